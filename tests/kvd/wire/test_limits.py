"""Every field of every message has a limit, so that no message costs more than its kind is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from kvd.geometry.rank import Rank
from kvd.wire.errors import Malformed, TooLarge, UnknownMessage, VersionMismatch, WireError
from kvd.wire.event import KvdEvent
from kvd.wire.frame import MESSAGES, WIRE_VERSION, decode, encode
from kvd.wire.handshake import PeerReady, Ping
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts, LeaseKey, WorkerCard
from kvd.wire.lease import LeaseClaim, LeaseExtend, LeaseOpened
from kvd.wire.limits import (
    BYTES,
    FOR_CLIENTS,
    FOR_CLIENTS_AND_LINKS,
    LONGEST_ID,
    MIB,
    MOST,
    MOST_FOR_DAEMON,
    MOST_LEASES_HELD,
    MOST_LEASES_OPENED,
    MOST_RECORDS,
    SMALL,
    bytes_allowed,
)
from kvd.wire.registration import Heartbeat, OpenLease, OpenReader, RegisterScheduler
from kvd.wire.reply import RefusalFactor, refusal
from kvd.wire.transfer import ListTransfers, ReportTransfers, TransferRecord

LONG, EMPTY = 600, b"\x90"
FACTS = EngineFacts(engine_id="e", model="m")
KEY = LeaseKey(engine_id="e", request_id="r")


def unlimited(kind: inspect.Type, where: str) -> Iterator[str]:  # noqa: C901, PLR0912 (one case for each kind of type)
    """The places of a type that take any amount, or any number."""
    match kind:
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield where
        case inspect.IntType() | inspect.FloatType():
            if kind.ge is None or kind.le is None or kind.le > 1e300:
                yield where
        case inspect.VarTupleType() | inspect.ListType():
            if kind.max_length is None:
                yield where
            yield from unlimited(kind.item_type, f"{where}[]")
        case inspect.TupleType():
            for part in kind.item_types:
                yield from unlimited(part, f"{where}[]")
        case inspect.DictType():
            if kind.max_length is None:
                yield where
            yield from unlimited(kind.key_type, f"{where} key")
            yield from unlimited(kind.value_type, f"{where} value")
        case inspect.UnionType():
            for part in kind.types:
                yield from unlimited(part, where)
        case inspect.StructType():
            for field in kind.fields:
                yield from unlimited(field.type, f"{where}.{field.name}")
        case inspect.LiteralType() | inspect.BoolType() | inspect.NoneType():
            return
        case _:
            raise AssertionError(f"{where}: no limit is known for {kind}")


@pytest.mark.parametrize("struct", [*MESSAGES.values(), KvdEvent], ids=lambda struct: struct.__name__)
def test_every_field_of_a_message_has_a_limit(struct: type[Any]) -> None:
    assert not list(unlimited(inspect.type_info(struct), struct.__name__))


def test_only_kinds_that_there_are_have_a_size_of_their_own() -> None:
    assert set(BYTES) <= set(MESSAGES)
    assert bytes_allowed("heartbeat") == SMALL


def refused(frame: bytes, kind: type[WireError] = Malformed) -> WireError:
    with pytest.raises(kind) as found:
        decode(frame)
    assert len(found.value.message) < 1200
    return found.value


def test_the_largest_engine_that_is_planned_for_is_taken() -> None:
    """4,096 workers; what describes 80 layers has 12 KB, so that it comes in parts of some hundred workers."""
    workers = tuple(
        WorkerCard(
            engine=FACTS, rank=Rank(tp=tp), incarnation=f"{tp:032}", pid=1, host="h", backend="nixl",
            geometry=b"g" * 12_000, metadata=b"m" * 4000,
        )
        for tp in range(4096)
    )  # fmt: skip
    card = EngineCard(engine=FACTS, generation="g", workers=workers)
    assert len(msgspec.msgpack.encode(card)) > bytes_allowed("engine_described")
    message, _ = decode(encode(PeerReady(local_engine="d", peer=card)))
    assert isinstance(message, PeerReady)
    assert len(message.peer.workers) == 4096


@pytest.mark.parametrize(
    ("message", "limit", "found"),
    [
        (LeaseOpened(engine_id="e", leases=(OpenLease("r", 1.0),) * 1000), f"<= {MOST_LEASES_OPENED}", "1000"),
        (LeaseClaim(key=LeaseKey(engine_id="e", request_id="q" * LONG), reader="r"), f"<= {LONGEST_ID}", "600"),
        (LeaseClaim(key=KEY, reader="r", extend_seconds=math.nan), ">= -1000000000000.0", "nan"),
        (LeaseClaim(key=KEY, reader="r", extend_seconds=math.inf), "<= 1000000000000.0", "inf"),
        (LeaseOpened(engine_id="e", leases=(OpenLease("r", -math.inf),)), ">= -1000000000000.0", "-inf"),
        (LeaseExtend(request_id="r", seconds=1e13), "<= 1000000000000.0", "10000000000000.0"),
        (ListTransfers(after=(1 << 64) - 1), f"<= {MOST}", str((1 << 64) - 1)),
        (ListTransfers(after=-1), ">= 0", "-1"),
        (ListTransfers(within=math.nan), ">= -1000000000000.0", "nan"),
        (Ping(kvd_id="k", kvd_generation="g", using=(("e", "g"),) * 20_000), "<= 16384", "20000"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_limit_and_what_was_found(message: Any, limit: str, found: str) -> None:
    error = refused(encode(message, 7))
    assert error.correlation == 7
    assert limit in error.message
    if len(encode(message)) <= SMALL:  # a larger one is not gone through once more
        assert error.message.endswith((f"; it has {found}", f"; it is {found}"))


def test_facts_are_finite_and_few() -> None:
    card = MESSAGES["register_worker"]
    for facts, why in (
        ({"scale": math.nan}, ">= -1e+300"),
        ({str(number): 1 for number in range(300)}, "`object` of length <= 256; it has 300"),
        ({"x": (1 << 64) - 1}, f"`int` <= {MOST}"),
    ):
        engine = EngineFacts(engine_id="e", model="m", facts=facts)  # type: ignore[arg-type]
        worker = WorkerCard(
            engine=engine, rank=Rank(), incarnation="i", pid=1, host="h", backend="b", geometry=b"", metadata=b""
        )  # fmt: skip
        message = refused(encode(card(worker), 1)).message
        assert all(part in message for part in why.split("; ")), message


@pytest.mark.parametrize("correlation", [-1, 1 << 63, (1 << 64) - 1])
def test_an_id_that_cannot_be_sent_back_is_no_id(correlation: int) -> None:
    error = refused(msgspec.msgpack.encode((WIRE_VERSION, correlation, {"type": "get_status"})))
    assert error.correlation == 0


def test_a_large_frame_is_judged_by_its_front() -> None:
    records = ReportTransfers(incarnation="i", records=())
    tail = EMPTY * (64 * MIB)
    items = b"\xdd" + len(tail).to_bytes(4, "big") + tail
    for front, kind, why in (
        (b"\x93\x02\x05" + items, TooLarge, f"at most {SMALL}"),
        (b"\x93\x02\x05\x81\xa1x" + items, TooLarge, f"at most {SMALL}"),
        (b"\x93\x02\x05\x82\xa4type\xa4ping\xa5using" + items, TooLarge, f"at most {bytes_allowed('ping')}"),
        (b"\x93\x02\x05\x82\xa4type\xa4nope\xa1x" + items, UnknownMessage, "'nope'"),
        (b"\x93\x03\x05\x82\xa4type\xa4ping\xa1x" + items, VersionMismatch, "version 3"),
    ):
        error = refused(front, kind)
        assert why in error.message
        assert error.correlation == (0 if SMALL == 0 or "at most 65536" in error.message else 5)
    assert decode(encode(records, 300)) == (records, 300)
    with pytest.raises(TooLarge, match="a ping of 300000 bytes; at most 262144"):
        decode(b"\x93\x02\x05\x82\xa4type\xa4ping".ljust(300_000, b"x"), 256 << 10)


@pytest.mark.parametrize("correlation", [1, 200, 60_000, 1 << 30, 1 << 40])
def test_a_large_message_is_taken_with_any_id(correlation: int) -> None:
    record = TransferRecord(
        transfer_id="t", request_id="r", local_engine="e", local_rank="tp0", remote_engine="p",
        remote_generation="g", remote_request_id="q", backend="b", mode="pull", state="miss", cause="x" * 2000,
    )  # fmt: skip
    message = ReportTransfers(incarnation="i", records=(record,) * MOST_RECORDS)
    assert len(encode(message)) > SMALL
    assert decode(encode(message, correlation)) == (message, correlation)


def test_what_cannot_be_decoded_leaves_its_id_where_that_can_be_read() -> None:
    for body, kind in (
        ({"type": "lease_opened"}, Malformed),
        ({"type": 7}, Malformed),
        ({}, UnknownMessage),
        ([], Malformed),
        ({"type": "\x1b[31m" * 99}, UnknownMessage),
    ):
        error = refused(msgspec.msgpack.encode((WIRE_VERSION, 9, body)), kind)
        assert error.correlation == 9
        assert "\x1b" not in error.message
    assert isinstance(decode(encode(Heartbeat(incarnation="i")))[0], Heartbeat)
    for noise in (b"", b"\xc1", b"\x93\x02\x01", EMPTY * 70_000, b"\x93\x02\x01" + b"\x91" * 60_000):
        assert refused(noise, WireError).correlation == 0


def test_a_refusal_is_small() -> None:
    factors = tuple(RefusalFactor(f"f{n}", "x" * 9000, "y" * 9000, ok=n < 500) for n in range(1000))
    small = refusal("KVD-BUSY", "word " * 10_000, hint="h" * 100_000, factors=factors)
    assert len(small.message) < 1100
    assert small.message.endswith("... (50,000 characters)")
    assert len(small.hint) < 300
    assert len(small.factors) == 64
    assert not any(factor.ok for factor in small.factors)
    assert len(encode(small)) < 64 << 10


def test_a_scheduler_registers_whatever_ids_its_clients_choose() -> None:
    """They have 512 characters at most; as many leases and claims as it lists fit into its message."""
    name, engine_id = "r" * LONGEST_ID, "e" * 128
    key = LeaseKey(engine_id=engine_id, request_id=name, endpoint=Endpoint("h" * 64, 65_535))
    message = RegisterScheduler(
        engine=FACTS, incarnation="i" * 32, pid=1, digest_key=b"k" * 32,
        leases=(OpenLease(name, 3600.5, 1 << 20),) * MOST_LEASES_HELD,
        readers=(OpenReader(key, "r" * 64, 3600.5),) * MOST_LEASES_HELD,
    )  # fmt: skip
    assert decode(encode(message, 1)) == (message, 1)


def whole_card(workers: int) -> EngineCard:
    """The card of an engine, not in parts."""
    worker = WorkerCard(
        engine=FACTS,
        rank=Rank(),
        incarnation="i",
        pid=1,
        host="h",
        backend="b",
        geometry=bytes(200),
        metadata=b"",
    )
    return EngineCard(engine=FACTS, generation="g", workers=(worker,) * workers)


def test_a_kvd_decodes_no_large_message_that_it_is_told_by_nobody() -> None:
    """16 MiB of facts took 2 s and 240 MB to decode."""
    large = encode(PeerReady(local_engine="d", peer=whole_card(600)), 7)
    assert len(large) > SMALL
    assert decode(large)[1] == 7, "a client takes it"
    with pytest.raises(TooLarge, match="taken from nobody here") as unwanted:
        decode(large, MOST_FOR_DAEMON, FOR_CLIENTS_AND_LINKS)
    with pytest.raises(TooLarge, match="the facts of 601 workers; at most 512") as much:
        decode(large, MOST_FOR_DAEMON, FOR_CLIENTS)
    assert unwanted.value.correlation == much.value.correlation == 7
    fits = encode(PeerReady(local_engine="d", peer=whole_card(500)), 7)
    assert decode(fits, MOST_FOR_DAEMON, FOR_CLIENTS)[1] == 7


def test_kinds_that_are_for_clients_are_kinds() -> None:
    assert MESSAGES.keys() >= FOR_CLIENTS_AND_LINKS
