"""Members by etcd, a real one: kvds find each other there, and lose nobody whatever becomes of it."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvctl.fleet.known import of_kvd
from kvd.wire.query import GetStatus
from tests.support.daemons import Daemon, facts, measured, scheduler, session, wait_for, worker
from tests.support.etcd_kvds import all_linked, all_there, kvds, linked, membership, settings
from tests.support.etcds import NEEDS_ETCD, PREFIX, Etcd, encoded, etcd
from tests.support.hosts import hosts

pytestmark = NEEDS_ETCD


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Etcd, list[Daemon]]]:
    """An etcd and three kvds that found each other."""
    with etcd() as server, kvds(3, server) as made:
        wait_for(lambda: all_linked(made), 20)
        wait_for(lambda: all_there(server, made))
        yield server, made


def never_lost(made: list[Daemon]) -> None:
    """None of them was ever forgotten by another."""
    for kvd in made:
        assert not [other.port for other in made if f":{other.port} is forgotten" in kvd.log]


def test_engines_of_kvds_that_found_each_other_are_warm(fleet: tuple[Etcd, list[Daemon]]) -> None:
    server, made = fleet
    with ExitStack() as stack:
        for kvd, name in zip(made, "pde", strict=True):
            stack.enter_context(session(kvd, worker(facts(name))))
            stack.enter_context(session(kvd, scheduler(facts(name))))
        wait_for(lambda: all(set(kvd.engines()) == {"p", "d", "e"} for kvd in made))
        assert made[1].engines()["p"].state == "ready"
    places = {port for _, port in of_kvd(made[0].status()).places}
    assert places == {made[1].port, made[2].port}, "kvctl --fleet asks them all"
    [value] = [json.loads(one["text"]) for name, one in server.hosts().items() if name == "h0"]
    assert set(value) == {"address", "generation", "key", "version"}
    assert (value["key"], value["generation"]) == ("", made[0].status().generation)


def test_a_key_that_is_deleted_or_overwritten_is_written_again(fleet: tuple[Etcd, list[Daemon]]) -> None:
    server, made = fleet
    server.delete("h0")
    wait_for(lambda: all_there(server, made))
    server.put("h0", json.dumps({"address": "127.0.0.1:1", "generation": "other"}))
    wait_for(lambda: all_there(server, made))
    wait_for(lambda: "the kvd at 127.0.0.1:1 writes the key of this host" in made[0].log)
    [line] = [line for line in made[0].log.splitlines() if "writes the key of this host" in line]
    assert "WARNING" in line
    assert "membership.etcd.host" in line
    assert all_linked(made)


def test_a_lease_that_was_revoked_is_had_anew(fleet: tuple[Etcd, list[Daemon]]) -> None:
    server, made = fleet
    before = server.hosts()["h1"]["lease"]
    server.ask("/v3/lease/revoke", {"ID": before})
    wait_for(lambda: all_there(server, made))
    assert server.hosts()["h1"]["lease"] != before


def test_junk_is_left_out_named_once_and_ends_nothing(fleet: tuple[Etcd, list[Daemon]]) -> None:
    server, made = fleet
    before = [kvd.status().counters.get("membership.refused", 0) for kvd in made]
    junk: dict[str, bytes | str] = {
        "no-json": b"\xff\x00\x1b[31m",
        "a-list": "[1, 2]",
        "no-address": "{}",
        "controls": json.dumps({"address": "evil\x1b[2J\n:1"}),
        "separators": json.dumps({"address": "a\u2028b:1"}),
        "nobody": json.dumps({"address": "0.0.0.0:1"}),
        "large": json.dumps({"address": "127.0.0.1:1", "version": "x" * 5000}),
        "long-key": json.dumps({"address": "127.0.0.1:1", "key": "x" * 100}),
        "deep": "[" * 4000,
        "not a\x1b[31mname": json.dumps({"address": "127.0.0.1:1"}),
    }
    try:
        for name, value in junk.items():
            server.put(name, value)
        for kvd, refused in zip(made, before, strict=True):
            wait_for(lambda k=kvd, r=refused: k.status().counters["membership.refused"] >= r + len(junk))  # type: ignore[misc]
            assert not [c for c in kvd.log if ord(c) < 32 and c != "\n"]
            assert "\u2028" not in kvd.log
            # The test before named one that is not there.
            wait_for(lambda k=kvd: membership(k).members - membership(k).vanished == 2)  # type: ignore[misc]
    finally:
        for name in junk:
            server.delete(name)
    assert all_linked(made)


def test_an_etcd_that_hangs_or_is_compacted_or_emptied_or_set_back_loses_nobody() -> None:
    with etcd() as server, kvds(3, server) as made:
        wait_for(lambda: all_linked(made), 20)
        wait_for(lambda: all_there(server, made))

        server.signal(signal.SIGSTOP)
        wait_for(lambda: all(membership(kvd).state == "away" for kvd in made), 20)
        assert "no answer within 2 s" in membership(made[0]).reason
        assert [membership(kvd).members for kvd in made] == [2, 2, 2]
        server.signal(signal.SIGCONT)
        wait_for(lambda: all(membership(kvd).state == "known" for kvd in made), 20)
        wait_for(lambda: all_there(server, made), 20)

        server.kill()
        kept = server.keep()
        wait_for(lambda: all(membership(kvd).state == "away" for kvd in made), 20)
        server.start()
        for number in range(20):
            server.put("other", json.dumps({"address": f"127.0.0.1:{number + 1}"}))
        server.delete("other")
        server.compact()
        wait_for(lambda: all(membership(kvd).state == "known" for kvd in made), 20)
        wait_for(lambda: all_there(server, made), 20)

        server.kill()
        server.empty()
        server.start()
        began = time.monotonic()
        wait_for(lambda: all_there(server, made), 20)
        measured("own keys in an etcd that came back empty", time.monotonic() - began)

        server.kill()
        server.set_back(kept)
        server.start()
        wait_for(lambda: all_there(server, made), 20)
        wait_for(lambda: all(membership(kvd).state == "known" for kvd in made), 20)
        wait_for(lambda: all(membership(kvd).vanished == 0 for kvd in made), 20)
        wait_for(lambda: all_linked(made), 20)
        never_lost(made)


def test_a_killed_kvd_is_gone_from_etcd_with_its_lease_and_forgotten() -> None:
    with etcd() as server, kvds(3, server) as made:
        wait_for(lambda: all_linked(made), 20)
        made[2].kill()
        began = time.monotonic()
        wait_for(lambda: all(made[2].port not in linked(kvd) for kvd in made[:2]), 20)
        assert membership(made[0]).members == 2, "its key is still there"
        wait_for(lambda: all(membership(kvd).members == 1 for kvd in made[:2]), 60)
        measured("a killed kvd is forgotten", time.monotonic() - began)
        assert set(server.hosts()) == {"h0", "h1"}
        assert "etcd does not name it any more" in made[0].log
        wait_for(lambda: len(made[0].status().peers) == 1)


def test_a_kvd_that_stops_takes_its_key_with_it_and_waits_for_no_etcd_that_hangs() -> None:
    with etcd() as server, kvds(3, server) as made:
        wait_for(lambda: all_there(server, made), 20)
        assert made[2].stop() == 0
        assert set(server.hosts()) == {"h0", "h1"}
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert made[1].stop() == 0
        took = time.monotonic() - began
        measured("a kvd stops while etcd hangs", took)
        assert took < 5.0
        server.signal(signal.SIGCONT)
        wait_for(lambda: set(server.hosts()) == {"h0"}, 30)


def test_the_next_server_is_asked_where_one_does_not_answer() -> None:
    with tempfile.TemporaryDirectory(prefix="etcd-") as place, etcd() as server:
        nobody = Etcd(Path(place))
        with kvds(2, nobody, server) as made:
            wait_for(lambda: all_linked(made), 20)
            wait_for(lambda: all_there(server, made))
            assert {membership(kvd).state for kvd in made} == {"known"}


def test_etcd_that_is_away_from_the_start_delays_nothing_and_counts_when_it_comes() -> None:
    with tempfile.TemporaryDirectory(prefix="etcd-") as place:
        server = Etcd(Path(place))
        with kvds(2, server) as made:
            wait_for(lambda: all(membership(kvd).state == "away" for kvd in made))
            server.start()
            try:
                wait_for(lambda: all_linked(made), 20)
            finally:
                server.kill()


def test_keys_come_from_the_list_alone_and_another_key_in_etcd_is_told_once() -> None:
    with etcd() as server, hosts("one", "other", **settings(server)) as fleet:
        one, other = fleet["one"], fleet["other"]
        wait_for(lambda: one.daemon.port in linked(other.daemon))
        stranger = other.daemon.port + 1 if other.daemon.port < 65535 else 1
        server.put(
            "stranger", json.dumps({"address": f"127.0.0.1:{stranger}", "key": other.pair.public.decode()})
        )
        wait_for(lambda: f"127.0.0.1:{stranger}" in one.daemon.log)
        row = next(p for p in one.daemon.status().peers if p.endpoint.port == stranger)
        assert row.state == "untrusted", "a key that etcd tells lets nobody in"
        # The same for a host that is trusted: etcd says that it has another key.
        one.daemon.stop()
        other.daemon.stop()
        wait_for(lambda: len(server.hosts()) == 1, 30)
        lie = one.pair.public.decode()
        server.put("other", json.dumps({"address": f"127.0.0.1:{other.daemon.port}", "key": lie}))
        one.daemon.start()
        wait_for(lambda: membership(one.daemon).other_key == 1)
        wait_for(lambda: "is expected here" in one.daemon.log)  # it is read from a pipe, by another thread
        [line] = [line for line in one.daemon.log.splitlines() if "is expected here" in line]
        assert lie in line
        assert other.pair.public.decode() in line
        assert membership(one.daemon).members == 1, "the stranger, whom nobody trusts"


def many(server: Etcd, count: int) -> None:
    """Write that many hosts, a thousand at a time."""

    def put(number: int) -> dict[str, object]:
        value = json.dumps({"address": f"10.{number >> 14}.{(number >> 7) & 127}.{number & 127}:9401"})
        key = encoded(f"{PREFIX}many-{number:05d}")
        return {"request_put": {"key": key, "value": encoded(value)}}

    for first in range(0, count, 1000):
        server.ask("/v3/kv/txn", {"success": [put(number) for number in range(first, first + 1000)]})


def test_a_change_of_thousands_of_hosts_at_once_is_read_page_by_page() -> None:
    with (
        etcd("--max-txn-ops", "4096", "--max-request-bytes", str(8 << 20)) as server,
        kvds(1, server) as (kvd,),
    ):
        wait_for(lambda: membership(kvd).state == "known")
        junk = [
            {"request_put": {"key": encoded(f"{PREFIX}x-{n}"), "value": encoded("x" * 400)}}
            for n in range(3000)
        ]
        server.ask("/v3/kv/txn", {"success": junk})
        server.put("real", json.dumps({"address": "127.0.0.1:1"}))
        wait_for(lambda: membership(kvd).members == 1, 20)
        wait_for(lambda: kvd.status().counters["membership.refused"] >= 3000, 20)
        assert "is away" not in kvd.log


def answers_meanwhile(kvd: Daemon, what: str) -> None:
    longest = 0.0
    for _ in range(50):
        began = time.monotonic()
        kvd.ask(GetStatus())
        longest = max(longest, time.monotonic() - began)
    measured(f"longest answer {what}", longest)
    measured(f"busiest turn {what}", kvd.status().gauges["loop.busiest_turn_seconds"])
    assert longest < 5.0


def test_of_five_thousand_hosts_4096_count_and_without_keys_none_outside_of_loopback() -> None:
    with etcd("--max-txn-ops", "2048") as server, kvds(1, server) as (kvd,):
        wait_for(lambda: membership(kvd).state == "known")
        many(server, 5000)
        wait_for(lambda: "5000 kvds are named, of which 4096 count" in kvd.log, 30)
        assert membership(kvd).members == 0
        assert 0 < kvd.log.count("is not linked: it is not on loopback") <= 32
        answers_meanwhile(kvd, "with 5,000 hosts in etcd")


def test_of_five_thousand_hosts_without_a_trusted_key_none_is_dialled() -> None:
    with etcd("--max-txn-ops", "2048") as server, hosts("one", "other") as fleet:
        one, other = fleet["one"].daemon, fleet["other"].daemon
        for kvd in (one, other):
            kvd.kill()
            kvd.environment |= settings(server) | {"KVD_PEER_LISTEN": "0.0.0.0:1"}
        one.host = other.host = "127.0.0.1"
        one.start()
        other.start()
        wait_for(lambda: linked(one) == {other.port})
        many(server, 5000)
        wait_for(lambda: "kvds are named, of which 4096 count" in one.log, 30)
        answers_meanwhile(one, "with 4,096 hosts that are not trusted")
        assert linked(one) == {other.port}
