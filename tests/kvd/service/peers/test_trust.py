"""Keys of the peer socket: made, checked, and asked for on the wire."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import zmq

from kvd.client.errors import RefusedByDaemon
from kvd.keys import TrustedKey, write_trusted
from kvd.service.config import CurveSettings
from kvd.service.errors import ConfigError
from kvd.service.peers import trust
from kvd.service.peers.trust import SETTLED_LOOKS, SETTLED_SECONDS
from kvd.wire.frame import encode
from kvd.wire.handshake import GetPeer, PeerReady, Ping
from kvd.zmtp.curve import generate
from tests.support.daemons import daemons, facts, session, worker


def test_a_pair_is_written_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "key"
    public = trust.create(path)
    keys = trust.load(CurveSettings(key_file=str(path)))
    assert keys is not None
    assert keys.public.decode() == public
    assert keys.authorised == {keys.public}
    assert keys.of("h", 1) == keys.public
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="it exists"):
        trust.create(path)


def test_mistakes_in_key_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="key_file is not set"):
        trust.load(CurveSettings(authorized_keys="x"))
    with pytest.raises(ConfigError, match="No such file"):
        trust.load(CurveSettings(key_file=str(path)))
    path.write_text("public abc\nsecret def\n")
    with pytest.raises(ConfigError, match="public: found 3 characters"):
        trust.load(CurveSettings(key_file=str(path)))
    path.unlink()
    trust.create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        trust.load(CurveSettings(key_file=str(path)))


def test_a_place_with_two_keys_is_named_and_the_last_one_counts() -> None:
    keys = trust.Keys(b"P", b"S")
    first, second = TrustedKey(b"A", "h", 1), TrustedKey(b"B", "h", 1)
    assert keys.take((first, TrustedKey(b"A", "h", 2)))
    assert keys.twice == ""
    assert keys.take((first, second))
    assert keys.twice == "h:1 has the keys A and B"
    assert keys.of("h", 1) == b"B"


@pytest.mark.parametrize("begun", ["in its place", "as another file"])
def test_a_list_that_is_half_written_revokes_nobody_and_one_that_is_renamed_counts_at_once(
    tmp_path: Path, begun: str
) -> None:
    """`cp --remove-destination`, `rm` and some editors make another file under the list's name, and write it there."""
    pair, listed = tmp_path / "key", tmp_path / "trusted"
    trust.create(pair)
    hosts = [TrustedKey(generate()[0], f"10.0.0.{number}") for number in range(4)]
    write_trusted(listed, hosts)
    keys = trust.load(CurveSettings(key_file=str(pair), authorized_keys=str(listed)))
    assert keys is not None
    if begun == "as another file":
        listed.rename(tmp_path / "held")  # else the new one may get its inode again
    listed.write_text(f"{hosts[0].line}\n")
    for _ in range(SETTLED_LOOKS):
        assert keys.stale
        assert keys.half_written(keys.read())
    time.sleep(SETTLED_SECONDS)
    assert keys.stale
    found = keys.read()
    assert not keys.half_written(found)
    keys.take(found)
    assert len(keys.authorised) == 1
    write_trusted(listed, hosts)
    keys.take(keys.read())
    write_trusted(listed, hosts[:2])
    assert not keys.half_written(keys.read()), "`kvctl keys revoke` waits for nothing"


def test_a_half_written_list_counts_by_looks_where_the_machine_stood_still_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is old by then, by any clock, but whoever writes it stood still as well."""
    pair, listed = tmp_path / "key", tmp_path / "trusted"
    trust.create(pair)
    write_trusted(listed, [TrustedKey(generate()[0], "10.0.0.1")])
    keys = trust.load(CurveSettings(key_file=str(pair), authorized_keys=str(listed)))
    assert keys is not None
    listed.write_text("")
    old = time.time() - 10
    os.utime(listed, (old, old))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert keys.half_written(keys.read())
    now += 60
    assert keys.half_written(keys.read())


def test_kvds_with_one_key_file_reach_each_other_and_strangers_do_not(tmp_path: Path) -> None:
    path = tmp_path / "key"
    trust.create(path)
    keys = trust.load(CurveSettings(key_file=str(path)))
    assert keys is not None
    with daemons(2) as (near, far):
        for kvd in (near, far):
            kvd.kill()
            kvd.environment = {"KVD_PEER_CURVE_KEY_FILE": str(path)}
            kvd.start()
        with session(far, worker(facts("p"))), session(near, worker(facts("d"))) as one:
            ask = GetPeer(local_engine="d", engine_id="p", endpoint=far.endpoint)
            assert isinstance(one.call(ask, 10).result(10), PeerReady)
        public, secret = zmq.curve_keypair()
        for stranger in (None, (public, secret)):
            with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
                sender.linger = 0
                if stranger:
                    sender.curve_publickey, sender.curve_secretkey = stranger
                    sender.curve_serverkey = keys.public
                sender.connect(f"tcp://127.0.0.1:{far.port}")
                sender.send(encode(Ping(kvd_id="x", kvd_generation="y"), 1))
                assert not sender.poll(500)


def test_a_kvd_without_keys_is_told_that_the_peer_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "key"
    trust.create(path)
    with daemons(2) as (near, far):
        far.kill()
        far.environment = {"KVD_PEER_CURVE_KEY_FILE": str(path)}
        far.start()
        with session(near, worker(facts("d"))) as one:
            error = one.call(GetPeer(local_engine="d", engine_id="p", endpoint=far.endpoint), 20).exception(
                20
            )
            assert isinstance(error, RefusedByDaemon)
            assert error.code == "KVD-PEER-UNREACHABLE"
