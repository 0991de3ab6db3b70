"""A daemon in a thread that speaks the real wire over real sockets, with the same few engines every time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import zmq

from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.geometry.shards import Placement, kv_fields, share, token_axes
from kvd.wire import query
from kvd.wire.drain import DrainEngines, DrainRow, EnginesDraining
from kvd.wire.event import KvdEvent
from kvd.wire.frame import Message, decode, encode
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts, Role, WorkerCard
from kvd.wire.names import events_address, generation_of, socket_address
from kvd.wire.outcomes import GetOutcomes, OutcomeCount, OutcomeRow, Outcomes
from kvd.wire.reply import Refused
from kvd.wire.transfer import (
    BlockRuns,
    GetKeptEngine,
    GroupShare,
    KeptEngine,
    LedgerRow,
    ListTransfers,
    TransferList,
    TransferRecord,
)
from tests.kvctl import held_answers, order_answers

MODEL = "Qwen/Qwen3-8B"
SINCE = 1_795_000_000.25

HEADS, HEAD_SIZE, BLOCK, LAYERS, BLOCKS = 8, 128, 16, 36, 4


def geometry(tp: int, ranks: int, *, heads: int = HEADS) -> WorkerGeometry:
    """One worker of a dense bfloat16 model: a tensor [blocks, heads, tokens, K and V joined] for each layer."""
    part = share("heads", heads, tp, ranks)
    token_stride = 2 * HEAD_SIZE * 2
    head_stride = BLOCK * token_stride
    page = Page(
        part.extent * head_stride,
        kv_fields(
            dtype="bfloat16",
            itemsize=2,
            heads=part,
            tokens=token_axes(
                kernel_blocks=1, kernel_tokens=BLOCK, kernel_stride=0, token_stride=token_stride
            ),
            block_tokens=BLOCK,
            key_size=HEAD_SIZE,
            value_size=HEAD_SIZE,
            place=Placement(head_stride, 2, 0, HEAD_SIZE * 2),
        ),
    )
    names = [f"model.layers.{n}.self_attn" for n in range(LAYERS)]
    layers = tuple(Layer(name, page, 0, n * BLOCKS * page.size, page.size) for n, name in enumerate(names))
    region = Region(0x7F0000000000, LAYERS * BLOCKS * page.size)
    return WorkerGeometry(Rank(tp=tp), BLOCKS, (region,), (Group(0, "full", BLOCK, layers),))


def engine_row(name: str, role: Role, tp: int, *, model: str = MODEL, heads: int = HEADS) -> query.EngineRow:
    """A complete engine with its card."""
    weights = f"w1-{hashlib.blake2b(model.encode(), digest_size=8).hexdigest()}"
    facts = EngineFacts(
        engine_id=name,
        model=model,
        role=role,
        tp=tp,
        world_size=tp,
        facts={"dtype": "bfloat16", "weights": weights},
    )
    workers = tuple(
        WorkerCard(
            engine=facts,
            rank=Rank(n),
            incarnation=f"{name}-{n}",
            pid=100 + n,
            host="node7",
            backend="nixl",
            geometry=encode_worker(geometry(n, tp, heads=heads)),
            metadata=b"",
        )
        for n in range(tp)
    )
    generation = generation_of(worker.incarnation for worker in workers)
    return query.EngineRow(
        engine=facts,
        generation=generation,
        local=role != "prefill",
        state="ready",
        ranks=tuple(Rank(n) for n in range(tp)),
        since=SINCE,
        scheduler=role != "prefill",
        policy="recompute",
        endpoint=Endpoint("10.0.0.8", 7766) if role == "prefill" else Endpoint(),
        card=EngineCard(engine=facts, generation=generation, workers=workers),
    )


LEASES = query.LeaseList(
    rows=(
        query.LeaseRow(
            engine_id="prefill-1",
            request_id="cmpl-4-p",
            reader="decode-0",
            age=0.25,
            left=28.5,
            readers=1,
            endpoint=Endpoint("10.0.0.8", 7766),
        ),
    ),
    open=2,
    taken=1,
)

DRAINING = EnginesDraining(
    rows=(
        DrainRow(
            engine_id="decode-0",
            role="decode",
            draining=True,
            age=7.5,
            reads=0,
            prefills=0,
            pushes=0,
            loads=0,
        ),
        DrainRow(engine_id="decode-1", role="decode", draining=False, reads=3, prefills=0, pushes=0, loads=5),
    )
)


def _draining(message: Message) -> Message:
    assert isinstance(message, DrainEngines)
    rows = tuple(row for row in DRAINING.rows if message.engine_id in ("", row.engine_id))
    return EnginesDraining(rows=rows)


ENGINES = (
    msgspec.structs.replace(engine_row("decode-0", "decode", 2), peers=("prefill-1",)),
    engine_row("prefill-1", "prefill", 4),
    query.EngineRow(
        engine=EngineFacts(engine_id="prefill-0", model=MODEL, role="prefill", tp=4, pp=2, world_size=8),
        generation="",
        local=False,
        state="partial",
        ranks=(Rank(0, 1), Rank(1)),
        since=SINCE,
        endpoint=Endpoint("10.0.0.7", 7766),
        reason="6 of 8 workers are missing",
    ),
)

WORKERS = (
    query.WorkerRow(
        kind="worker",
        engine_id="decode-0",
        rank=Rank(1),
        pid=4242,
        incarnation="0f0f",
        state="alive",
        registered=SINCE,
        heartbeat_age=0.12,
        backend="nixl",
        regions=36,
        registered_bytes=24 << 30,
    ),
    query.WorkerRow(
        kind="scheduler",
        engine_id="decode-0",
        rank=None,
        pid=4240,
        incarnation="1e1e",
        state="silent",
        registered=SINCE,
        heartbeat_age=3.5,
        reason="no heartbeat for 3.5 s",
    ),
)

STATUS = query.KvdStatus(
    kvd_id="kvd-node7",
    generation="77aa",
    version="0.1.0",
    pid=911,
    host="node7",
    started=SINCE,
    runtime_dir="/run/kvd",
    endpoint=Endpoint("::1", 7766),
    counters={"handshakes.flights": 4, "leases.opened": 40, "leases.released": 38, "received.malformed": 0},
    gauges={"leases.open": 2.0, "leases.readers": 2.0},
    peers=(
        query.PeerRow(
            endpoint=Endpoint("10.0.0.8", 7766), kvd_id="kvd-node8", state="up", rtt=0.00031, since=SINCE
        ),
    ),
    membership=query.Membership(source="static", state="known", age=60.0, members=1),
)


def ledger_row(seq: int, **changes: object) -> LedgerRow:
    record = TransferRecord(
        transfer_id=f"t-{seq}",
        request_id=f"cmpl-{seq}",
        local_engine="decode-0",
        local_rank="tp1",
        remote_engine="prefill-1",
        remote_generation=ENGINES[1].generation,
        remote_request_id=f"cmpl-{seq}-p",
        backend="nixl",
        mode="pull",
        state="done",
        started=SINCE + seq,
        tokens=1024,
        bytes=64 << 20,
        descriptors=512,
        coalesced_descriptors=8,
        remote_ranks=("tp2", "tp3"),
        groups=(GroupShare(0, "full", 3, 64 << 20),),
        stages={"queued": 0.0012, "handshake": 0.0, "wire": 0.008},
        local_generation=ENGINES[0].generation,
        local_blocks=(BlockRuns(0, 0, ((1, 2), (0, 1))),),
        remote_blocks=(BlockRuns(0, 0, ((1, 3),)),),
        moments={"queued": -0.0012, "posted": 0.0004, "last": 0.0084},
    )
    return LedgerRow(seq, msgspec.structs.replace(record, **changes))


LEDGER = (
    ledger_row(3, state="miss", cause="peer went away", code="PEER_GONE", bytes=0, stages={}),
    ledger_row(2),
    ledger_row(1),
)


SERVED = (
    OutcomeRow(
        engine_id="decode-0",
        role="decode",
        model=MODEL,
        seconds=60.0,
        lately=(OutcomeCount("loaded", "", 38, 38_000), OutcomeCount("plain", "", 2, 40)),
    ),
)


@dataclass
class FakeDaemon:
    """Answers from ``answers``; whatever is not there is refused. ``asked`` holds the requests as they came."""

    directory: Path
    answers: dict[type, Callable[[Message], Message | None]]
    asked: list[Message] = field(default_factory=list)
    events: tuple[KvdEvent, ...] = ()

    def serve(self, context: zmq.Context[zmq.Socket[bytes]], ready: threading.Event) -> None:
        router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.XPUB)
        for socket in (router, publisher):
            socket.setsockopt(zmq.LINGER, 0)
        router.bind(socket_address(self.directory))
        publisher.bind(events_address(self.directory))
        ready.set()
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(publisher, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is router:
                        self._answer(router)
                    elif publisher.recv()[:1] == b"\x01":
                        for event in self.events:
                            publisher.send_multipart([event.kind.encode(), msgspec.msgpack.encode(event)])
        except zmq.ContextTerminated:
            router.close()
            publisher.close()

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        sender, frame = router.recv_multipart()
        message, correlation = decode(frame)
        self.asked.append(message)
        make = self.answers.get(type(message))
        answer = make(message) if make else Refused(code="KVD-NO", message="not here", hint="ask another")
        if answer is not None:
            router.send_multipart([sender, encode(answer, correlation)])


def _engines(message: Message) -> Message:
    assert isinstance(message, query.ListEngines)
    if message.cards:
        return query.EngineList(rows=ENGINES)
    return query.EngineList(rows=tuple(msgspec.structs.replace(row, card=None) for row in ENGINES))


def _transfers(message: Message) -> Message:
    assert isinstance(message, ListTransfers)
    rows = tuple(
        row if message.blocks else _without_blocks(row)
        for row in LEDGER
        if row.seq > message.after
        and (not message.before or row.seq < message.before)
        and message.request_id in ("", row.record.request_id)
        and message.any_id in ("", row.record.transfer_id, row.record.request_id, str(row.seq))
        and message.state in ("", row.record.state)
    )
    return TransferList(rows=rows[: message.limit], total=len(LEDGER), more=len(rows) > message.limit)


def _without_blocks(row: LedgerRow) -> LedgerRow:
    bare = msgspec.structs.replace(row.record, local_blocks=(), remote_blocks=())
    return msgspec.structs.replace(row, record=bare)


def _kept_engine(message: Message) -> Message:
    assert isinstance(message, GetKeptEngine)
    for engine in ENGINES:
        if engine.card and (engine.engine.engine_id, engine.generation) == (
            message.engine_id,
            message.generation,
        ):
            geometries = tuple(worker.geometry for worker in engine.card.workers)
            return KeptEngine(engine=engine.engine, generation=engine.generation, geometries=geometries)
    return Refused(code="KVD-NO-ENGINE", message="not kept")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(
        tmp_path / "run",
        {
            query.ListEngines: _engines,
            query.ListWorkers: lambda _: query.WorkerList(rows=WORKERS),
            query.GetStatus: lambda _: STATUS,
            query.ListLeases: lambda _: LEASES,
            DrainEngines: _draining,
            ListTransfers: _transfers,
            GetOutcomes: lambda _: Outcomes(rows=SERVED),
            **order_answers.ANSWERS,
            **held_answers.ANSWERS,
            GetKeptEngine: _kept_engine,
        },
        events=tuple(
            KvdEvent(seq=n, time=SINCE + n, kind=kind, subject="decode-0", detail={"ranks": n})
            for n, kind in ((1, "engine.ready"), (2, "transfer.miss"), (5, "lease.expired"))
        ),
    )
    fake.directory.mkdir()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ready = threading.Event()
    thread = threading.Thread(target=fake.serve, args=(context, ready))
    thread.start()
    assert ready.wait(5)
    yield fake
    context.term()
    thread.join(5)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("KVCTL_", "KVD_")) or name in ("NO_COLOR", "FORCE_COLOR", "XDG_RUNTIME_DIR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line inside this process: quick, for everything that is not about processes."""
    from kvctl.main import main

    def in_process(*arguments: str | Path) -> Outcome:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return in_process


@pytest.fixture
def process() -> Run:
    """The command line as a process of its own."""

    def in_a_process(*arguments: str | Path, **options: object) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "kvctl", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,  # type: ignore[call-overload]
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return in_a_process
