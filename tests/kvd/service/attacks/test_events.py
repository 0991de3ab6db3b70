"""Readers of events that subscribe to too much, or do not read: others get all of theirs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from kvd.zmtp.frames import buffers, command, named
from tests.support.attacked import assert_unfelled, attack, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, session, wait_for, worker
from tests.support.raw_zmtp import frame, spoken

SECONDS = 1.0
MOST = 256


def subscribe_to_much(where: Path) -> None:
    """Subscriptions of 1 MB, and as many as can be, in both of ZMTP's ways."""
    large = buffers(b"\1" + bytes(1 << 20))
    many = b"".join(buffers(b"\1%d" % number)[0] for number in range(20_000))
    commands = b"".join(command(named(b"SUBSCRIBE", b"%d" % number)) for number in range(20_000))
    while True:
        for bytes_ in (b"".join(large), many, commands):
            with contextlib.suppress(OSError):
                spoken(where, "SUB").sendall(bytes_)


def test_subscriptions_that_are_too_large_or_too_many() -> None:
    with daemons() as (kvd,):
        with attacked(kvd) as watch:
            attack(subscribe_to_much, kvd.directory / "events.sock", seconds=SECONDS)
        assert_unfelled(watch.verdict())
        assert kvd.status().counters["connections.events.too_many_topics"] > 0
        sees_what_happens(kvd)


def sees_what_happens(kvd: Daemon) -> None:
    """Whoever subscribes now is told of what happens from then on."""
    with spoken(kvd.directory / "events.sock", "SUB") as reader:
        reader.sendall(buffers(b"\1engine.ready")[0])
        reader.settimeout(0.1)

        def told() -> bytes:
            with contextlib.suppress(TimeoutError), session(kvd, worker(facts("e"))):
                return frame(reader)
            return b""

        assert wait_for(told) == b"engine.ready"


def never_read(where: Path) -> None:
    held = [spoken(where, "SUB") for _ in range(100)]
    for reader in held:
        reader.sendall(buffers(b"\1")[0])
    while True:
        time.sleep(1)


def make_events(directory: Path) -> None:
    """Engines that come and go: two events and more for each."""
    from kvd.client.session import KvdSession

    while True:
        made = KvdSession(lambda: worker(facts("e" * 1000)), directory=directory)
        made.wait(lambda state: state.connected, 10)
        made.close()


def test_readers_that_do_not_read_take_nothing_from_others() -> None:
    with daemons() as (kvd,):
        with attacked(kvd) as watch, attacking(never_read, kvd.directory / "events.sock"):
            attack(make_events, kvd.directory, seconds=SECONDS)
        assert_unfelled(watch.verdict())
        sees_what_happens(kvd)


def test_so_many_readers_and_no_more() -> None:
    """Each event is matched with each of them."""
    with daemons() as (kvd,), contextlib.ExitStack() as stack:
        where = kvd.directory / "events.sock"

        def refused() -> int:
            with contextlib.suppress(OSError):
                stack.enter_context(spoken(where, "SUB"))
            return kvd.status().counters.get("connections.events.refused", 0)

        wait_for(refused, 30)
        counters = kvd.status().counters
        ended = sum(counters.get(f"connections.events.{how}", 0) for how in ("refused", "handshake_failed"))
        assert counters["connections.events.accepted"] - ended == MOST * 3 // 4  # one user's share
        stack.close()
        wait_for(lambda: kvd.status().counters.get("connections.events.ended", 0) >= MOST * 3 // 4)
        sees_what_happens(kvd)
