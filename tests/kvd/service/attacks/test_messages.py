"""Messages that are well-formed and too much: what one may cost is known before it is decoded, and bounded after it."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvd.client.errors import RefusedByDaemon
from kvd.geometry.rank import Rank
from kvd.wire.checksum import GetSums
from kvd.wire.frame import decode, encode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint, LeaseKey, WorkerCard
from kvd.wire.lease import LeaseClaim, LeaseOpened
from kvd.wire.limits import LONGEST_ID, MIB, MOST_LEASES_OPENED, MOST_RECORDS
from kvd.wire.registration import OpenLease, RegisterWorker
from kvd.wire.reply import Refused
from kvd.wire.transfer import ListTransfers, ReportTransfers, TransferRecord
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, geometry, scheduler, session, wait_for, worker

SECONDS = 1.0
RECORD = TransferRecord(
    transfer_id="t", request_id="r", local_engine="e", local_rank="tp0", remote_engine="p", remote_generation="g",
    remote_request_id="q", backend="nixl", mode="pull", state="miss", code="TOO_LATE",
)  # fmt: skip


def empty_arrays(size: int = 64 * MIB) -> bytes:
    """67 million of them in one frame, in a place that nobody reads."""
    front = b"\x93\x02\x05\x82\xa4type\xafreport_transfers\xa1x\xdd"
    return front + size.to_bytes(4, "big") + b"\x90" * size


def hidden_arrays() -> bytes:
    """As many as a message of that kind may have bytes."""
    return empty_arrays(4 * MIB - 200)


def many_leases() -> bytes:
    """100,000 of them in one message."""
    return encode(LeaseOpened(engine_id="e", leases=(OpenLease("r", 3600.0),) * 100_000), 5)


def many_misses() -> bytes:
    """100,000 of them in one report."""
    return encode(ReportTransfers(incarnation="i", records=(RECORD,) * 100_000), 5)


def many_axes() -> bytes:
    """A field with so many axes that a geometry holds no more."""
    plain = json.loads(geometry(0, 8))
    field = plain["pages"][0]["fields"][0]
    field["axes"] = [[f"a{number}", 0, 1, 1, 1] for number in range(25_000)]
    field["shape"] = [[f"a{number}", 1] for number in range(25_000)]
    return encode(RegisterWorker(described(json.dumps(plain, separators=(",", ":")).encode())), 5)


def packed_axes() -> bytes:
    """About the largest geometry that is taken, in as few bytes as it may come."""
    axis = b'["a",0,1,1,1],'
    noise = random.Random(0).randbytes(8_000).hex().encode()
    plain = geometry(0, 8).replace(b'"axes":[', b'"axes":[' + axis * (900_000 // len(axis)))
    packed = zlib.compress(plain[:-1] + b',"noise":"%b"}' % noise, 9)
    assert len(packed) < 20_000
    return encode(RegisterWorker(described(packed), packed=True), 5)


def long_ids() -> bytes:
    """A claim on a lease whose name has a megabyte."""
    return encode(LeaseClaim(key=LeaseKey(engine_id="e" * MIB, request_id="r" * MIB), reader="x"), 5)


def described(plain: bytes) -> WorkerCard:
    return WorkerCard(
        engine=facts("e"), rank=Rank(), incarnation="i", pid=1, host="h", backend="b", geometry=plain, metadata=b""
    )  # fmt: skip


def send_again_and_again(directory: Path, made: Callable[[], bytes], seconds: float) -> None:
    """Send a frame, wait for what comes of it, and so on. A connection that is closed is made anew."""
    frame, ends = made(), time.monotonic() + seconds
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.sndhwm = 0, 4
        sender.connect(f"ipc://{directory}/kvd.sock")
        while time.monotonic() < ends:
            if sender.poll(100, zmq.POLLOUT):
                sender.send(frame, zmq.NOBLOCK)
            sender.poll(100)
            while sender.poll(0):
                sender.recv()


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """One kvd for all kinds: it has to outlive each of them."""
    with daemons() as (kvd,):
        yield kvd


@pytest.mark.parametrize(
    "made",
    [empty_arrays, hidden_arrays, many_leases, many_misses, many_axes, packed_axes, long_ids],
    ids=lambda made: made.__name__,
)
def test_a_message_that_is_too_much_keeps_nobody_waiting(shared: Daemon, made: Callable[[], bytes]) -> None:
    """It was: 38 s and 4.8 GB, 10.8 s for leases, 18 s for misses, 7.9 s for axes, 1.6 GB for ids."""
    written = len(shared.log)
    with (
        attacked(shared) as watch,
        attacking(send_again_and_again, shared.directory, made, SECONDS) as attacker,
    ):
        assert attacker.wait(SECONDS + 20)
    assert_unfelled(watch.verdict())
    assert "errors.internal" not in shared.status().counters
    assert len(shared.log) - written < 100_000
    with session(shared, worker(facts("e"))):
        assert shared.engines()["e"].state == "ready"


def test_the_largest_messages_that_are_taken_keep_nobody_waiting() -> None:
    """Leases and records in the amounts that one message may have, from one who may send them."""
    with daemons() as (kvd,), session(kvd, worker(facts("e", role="prefill"))):
        scheduled = scheduler(facts("e", role="prefill"))
        with session(kvd, scheduled) as held, attacked(kvd) as watch:
            ends, number = time.monotonic() + SECONDS, 0
            while time.monotonic() < ends:
                number += 1
                leases = tuple(OpenLease(f"r{number}-{n}", 0.2) for n in range(MOST_LEASES_OPENED))
                held.call(LeaseOpened(engine_id="e", leases=leases), 20.0).result(20)
                records = tuple(
                    msgspec.structs.replace(RECORD, transfer_id=f"t{number}-{n}", local_rank="scheduler")
                    for n in range(MOST_RECORDS)
                )
                held.call(ReportTransfers(incarnation=scheduled.incarnation, records=records), 20.0).result(
                    20
                )
        assert_unfelled(watch.verdict())
        assert number > 3
        wait_for(lambda: kvd.status().gauges["leases.open"] == 0)


def test_numbers_that_are_none_are_refused_and_clocks_go_on() -> None:
    """A lease of NaN seconds broke the heap of timers: nothing expired, and no worker was ever silent."""
    with daemons() as (kvd,), session(kvd, scheduler(facts("e", role="prefill"))) as held:
        for seconds in (math.nan, math.inf, -math.inf, 1e300):
            opened = LeaseOpened(engine_id="e", leases=(OpenLease("strange", seconds),))
            error = held.call(opened, 20.0).exception(20)
            assert isinstance(error, RefusedByDaemon)
            assert (error.code, error.refusal.final) == ("KVD-WIRE-MALFORMED", True)
            assert f"; it is {seconds}" in error.message
        held.call(LeaseOpened(engine_id="e", leases=(OpenLease("r", 0.1),)), 20.0).result(20)
        wait_for(lambda: kvd.status().counters.get("leases.expired") == 1)


def test_numbers_that_the_ledger_cannot_hold_are_refused_and_it_goes_on() -> None:
    with daemons() as (kvd,):
        for query in (
            ListTransfers(after=(1 << 64) - 1),
            ListTransfers(before=1 << 63),
            ListTransfers(limit=-1),
        ):
            answer = kvd.ask_refused(query)
            assert (answer.code, answer.final) == ("KVD-WIRE-MALFORMED", True)
        for _ in range(3):
            kvd.ask(ListTransfers(after=(1 << 63) - 1))


def test_refusals_are_small() -> None:
    """66 bytes caused 1.46 MB: the names of all engines that are known."""
    with daemons() as (kvd,), zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.linger, sender.rcvtimeo = 0, 20_000
        sender.connect(f"ipc://{kvd.directory}/kvd.sock")
        for number in range(40):
            sender.send(encode(worker(facts(f"{number:03}" + "e" * (LONGEST_ID - 3))), number + 1))
            sender.recv()
        questions: list[Any] = [
            GetPeer(local_engine="d", engine_id="p" * LONGEST_ID, endpoint=Endpoint()),
            LeaseClaim(key=LeaseKey(engine_id="p", request_id="r" * (MIB // 20)), reader="x"),
            GetPeer(local_engine="000" + "e" * (LONGEST_ID - 3), engine_id="p" * LONGEST_ID),
        ]
        for question in questions:
            sender.send(encode(question, 900))
            while decode(answer := sender.recv())[1] != 900:
                pass
            message, _ = decode(answer)
            assert isinstance(message, Refused)
            assert len(answer) < 3000, message


@pytest.mark.parametrize("strange", ["a\x1b[31mb", "a\nINFO kvd: all is well", "a\x9bb", "\u202eb", "a\x00"])
def test_ids_that_a_terminal_would_obey_are_refused(strange: str) -> None:
    with daemons() as (kvd,):
        card = worker(facts("e"))
        cards = (
            msgspec.structs.replace(card, card=msgspec.structs.replace(card.card, incarnation=strange)),
            worker(facts(strange)),
            scheduler(facts(strange)),
        )
        for message in cards:
            answer = kvd.ask_refused(message)
            assert answer.code == "KVD-BAD-CARD"
            assert "control character" in answer.message
            assert strange not in answer.message
        assert not kvd.engines()


def test_no_id_forges_a_line_of_the_log() -> None:
    forged = "r\n2026-01-01 00:00:00,000 ERROR kvd: forged \x1b[2J"
    with daemons(1, "--log-level", "debug") as (kvd,):
        with (
            session(kvd, worker(facts("e", role="prefill"))),
            session(kvd, scheduler(facts("e", role="prefill"))) as held,
        ):
            held.call(LeaseOpened(engine_id="e", leases=(OpenLease(forged, 0.05),)), 20.0).result(20)
            wait_for(lambda: kvd.status().counters.get("leases.expired") == 1)
        assert kvd.stop() == 0
        assert "forged" in kvd.log
        assert "\x1b" not in kvd.log
        assert not [line for line in kvd.log.splitlines() if line.startswith("2026-01-01")]


def test_codes_of_others_make_no_series() -> None:
    """A peer's, or a worker's: each name of a counter is a metric of its own."""
    made_up = (Refused(code=f"MADE-UP-{number}", message="no") for number in itertools.count())
    with (
        daemons() as (kvd,),
        session(kvd, worker(facts("p", role="prefill")), on_push=lambda _: next(made_up)),
        session(kvd, worker(facts("d", role="decode"))) as asker,
    ):
        generation = kvd.engines()["p"].generation
        sums = GetSums(
            engine_id="p", generation=generation, endpoint=Endpoint(), rank=Rank(), request_id="r", wanted=()
        )  # fmt: skip
        for number in range(20):
            error = asker.call(sums, 20.0).exception(20)
            assert isinstance(error, RefusedByDaemon)
            assert error.code == f"MADE-UP-{number}"
        counters = kvd.status().counters
        assert counters["refused.OTHER"] == 20
        assert not [name for name in counters if "MADE" in name]
