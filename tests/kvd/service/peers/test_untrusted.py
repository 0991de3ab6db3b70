"""Two hosts of which one does not know the other's key: each says who it is, and what is to be typed where."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.keys import TrustedKey, write_trusted
from kvd.wire.query import PeerRow
from tests.support.daemons import wait_for
from tests.support.hosts import Host, hosts


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    """Hosts near and far, which are to be linked to each other."""
    with hosts("near", "far", KVD_PEER_DOWN_SECONDS="0.5", KVD_PEER_PING_SECONDS="0.2") as fleet:
        near, far = fleet["near"], fleet["far"]
        far.trust()
        for one, other in ((near, far), (far, near)):
            one.daemon.kill()
            one.daemon.environment["KVD_PEER_CONNECT"] = str(other.daemon.endpoint)
        far.daemon.start()
        near.daemon.start()
        yield near, far


def peer(host: Host) -> PeerRow:
    [row] = wait_for(lambda: host.daemon.status().peers)
    return row


def test_a_configured_peer_without_a_trusted_key_is_shown_and_told_once(pair: tuple[Host, Host]) -> None:
    near, far = pair
    row = peer(far)
    assert (row.endpoint, row.state) == (near.daemon.endpoint, "untrusted")
    assert "no key is trusted" in row.reason
    assert f"kvctl keys trust KEY {near.daemon.endpoint}" in row.hint
    assert far.daemon.status().gauges["peers.untrusted"] == 1
    wait_for(
        lambda: far.daemon.log.count(f"peer.connect: no key is trusted for the kvd at {near.daemon.endpoint}")
    )
    wait_for(lambda: far.counter("connections.peer.not_authorised") > 1)
    assert far.daemon.log.count("peer.connect: no key") == 1


def test_whose_key_is_refused_is_told_what_the_other_side_is_to_type(pair: tuple[Host, Host]) -> None:
    near, far = pair
    command = f"kvctl keys trust '{near.pair.public.decode()}' {near.daemon.endpoint}"
    wait_for(lambda: peer(near).state == "down")
    wait_for(lambda: command in peer(near).hint)
    assert peer(near).reason == "it does not let this host's key in"
    said = "does not let this host's key in;"
    wait_for(lambda: said in near.daemon.log and "peer.down" in near.daemon.log)
    [line] = [line for line in near.daemon.log.splitlines() if said in line and "peer.down" not in line]
    assert "WARNING" in line
    assert f"the kvd at {far.daemon.endpoint}" in line
    assert command in line
    assert f"WARNING kvd.service.sockets.events: peer.down {far.daemon.endpoint}" in near.daemon.log


def test_who_refuses_a_key_says_whose_and_what_lets_it_in(pair: tuple[Host, Host]) -> None:
    near, far = pair
    key = near.pair.public.decode()
    wait_for(lambda: far.counter("connections.peer.not_authorised") > 1)
    [row] = far.daemon.status().refused
    assert (row.key, row.address, row.was) == (key, "127.0.0.1", "")
    assert row.times > 1
    assert 0 <= row.age < 60
    wait_for(lambda: "not let in" in far.daemon.log)
    [line] = [line for line in far.daemon.log.splitlines() if "not let in" in line]
    assert f"kvctl keys trust '{key}' HOST:PORT" in line


def test_once_it_is_trusted_all_of_that_is_gone_and_once_revoked_it_says_so(pair: tuple[Host, Host]) -> None:
    near, far = pair
    far.trust_and_wait(near)
    wait_for(lambda: (peer(near).state, peer(far).state) == ("up", "up"))
    assert far.daemon.status().refused == ()
    assert peer(near).reason == peer(near).hint == ""
    wait_for(lambda: f"place={near.daemon.endpoint}" in far.daemon.log)
    far.trust_and_wait()
    wait_for(lambda: [one.was for one in far.daemon.status().refused] == [str(near.daemon.endpoint)])
    assert peer(far).state == "untrusted"
    assert "was revoked here" in peer(far).reason
    assert "keys trust" not in peer(far).hint, "what that host shows may be the stolen key"


def test_a_peer_that_has_another_key_than_is_trusted_is_told_on_both_sides(pair: tuple[Host, Host]) -> None:
    near, far = pair
    far.trust_and_wait(near)
    write_trusted(near.trusted, [TrustedKey(near.pair.public, "127.0.0.1", far.daemon.port)])
    wait_for(lambda: "another key" in peer(near).reason)
    assert f"kvctl keys trust 'KEY' {far.daemon.endpoint} --replace" in peer(near).hint
    wait_for(lambda: "" in {one.key for one in far.daemon.status().refused})
