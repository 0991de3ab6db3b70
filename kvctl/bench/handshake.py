"""The handshake measured: simulated workers of two engines, two real kvds, all decoding ranks asking at once.

The workers are sessions of this process; what they present has the engines' geometries and transfer metadata of usual
size, and they ask as the connector's workers do (`kvd.worker.peers.handshake`). They move nothing, and touch no kvd
but the two that are started here. Of the processor time the larger part is theirs: all their threads are in one
process here, and take turns at its interpreter, where real workers have a process each. So the part of the kvds is told
apart.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from kvctl.engines.cards import engine_facts
from kvctl.processes.daemons import Kvd, two_hosts
from kvctl.processes.errors import WorkerFailed
from kvd.client.cards import CardReader
from kvd.client.errors import ClientError
from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.wire.card_parts import ToldCard
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineFacts, WorkerCard
from kvd.wire.query import GetStatus, KvdStatus
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from kvd.worker.cause import Cause
from kvd.worker.peers.handshake import ask_for_peer, complete

if TYPE_CHECKING:
    from kvd.geometry.model import EngineGeometry, WorkerGeometry

SECONDS = 120.0
"""For anything to happen."""
METADATA_BYTES = 332, 44
"""What NIXL exports of a worker, and more of it for each region."""

HandshakeCase = Literal["cold", "warm", "replica", "restart"]
CASES: tuple[HandshakeCase, ...] = get_args(HandshakeCase)
"""In the order in which a round has them.

cold     both kvds have just started: no link, no engine, nothing compared
warm     the decoders' kvd knows the engine; a worker that was handed it does not even ask
replica  another engine with the same geometry, which no one here has heard of
restart  the first engine again, with new workers
"""
Asking = Literal["ranks", "scheduler"]
"""Who asks: every decoding rank at the same moment, or the decoders' scheduler alone, as in an engine: kvd tells its
ranks then. A scheduler that asks for what its ranks have been told has kvd tell them nothing, so there is no warm case.
"""


@dataclass(slots=True)
class Waits:
    """Seconds of all rounds: what each rank waited, and until all of a round had their answer; bytes of one answer.

    ``processor`` is the time on a processor that a round took of the kvds and of this process, the workers; ``serving``
    that of the kvds alone.
    """

    each: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    serving: list[float] = field(default_factory=list)
    bytes: int = 0

    def add(self, other: Waits) -> None:
        """Those of more rounds."""
        self.each += other.each
        self.whole += other.whole
        self.processor += other.processor
        self.serving += other.serving
        self.bytes = other.bytes or self.bytes


Answers = queue.Queue[tuple[ToldCard | Cause, float]]
"""What ranks were told, and the time.perf_counter() at which they had taken it apart."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The sessions of an engine's workers, and of its scheduler where it has one.

    ``told`` gets what kvd tells the workers unasked. ``readers`` are the workers', each with what it has read before.
    """

    workers: list[KvdSession]
    told: Answers
    scheduler: KvdSession | None = None
    readers: list[CardReader] = field(default_factory=list)


def measure(
    pair: tuple[EngineGeometry, EngineGeometry],
    rounds: int,
    folder: Path,
    told: Callable[[], None] = lambda: None,
    asking: Asking = "ranks",
) -> dict[HandshakeCase, Waits]:
    """The waits of the first engine's ranks for the second engine; ``told`` is called after each round.

    Raises `WorkerFailed` where an answer is none, and what starting kvds raises.
    """
    found: dict[HandshakeCase, Waits] = {case: Waits() for case in CASES}
    try:
        for _ in range(rounds):
            with two_hosts(folder) as hosts:
                _round(hosts, pair, found, asking)
            told()
    except ClientError as error:
        raise WorkerFailed(f"a handshake of the benchmark failed: {error.message}") from None
    return found


def _round(
    hosts: tuple[Kvd, Kvd],
    pair: tuple[EngineGeometry, EngineGeometry],
    found: dict[HandshakeCase, Waits],
    asking: Asking,
) -> None:
    far, near = hosts
    for host in hosts:
        _wait_prepared(host)
    local, remote = pair
    scheduler = asking == "scheduler"
    with registered(near, local, "decode", "decoder", scheduler=scheduler) as decoders:
        with registered(far, remote, "prefill", "one") as there:
            _ask(hosts, decoders, there, "one", found["cold"])
            if not scheduler:
                _ask(hosts, decoders, there, "one", found["warm"])
            with registered(far, remote, "prefill", "another") as others:
                _ask(hosts, decoders, others, "another", found["replica"])
        with registered(far, remote, "prefill", "one") as again:
            _ask(hosts, decoders, again, "one", found["restart"])


def card_of(worker: WorkerGeometry, facts: EngineFacts) -> WorkerCard:
    """A card as a worker presents it, with as much metadata as NIXL's has."""
    return WorkerCard(
        engine=facts,
        rank=worker.rank,
        incarnation=uuid.uuid4().hex,
        pid=os.getpid(),
        host=socket.gethostname(),
        backend="nixl",
        geometry=encode_worker(worker),
        metadata=os.urandom(METADATA_BYTES[0] + METADATA_BYTES[1] * len(worker.regions)),
    )


@contextmanager
def registered(
    host: Kvd,
    geometry: EngineGeometry,
    role: Literal["prefill", "decode"],
    name: str,
    *,
    scheduler: bool = False,
) -> Iterator[Ranks]:
    """The sessions of all workers of an engine, when it is complete, and of its ``scheduler`` if it is to have one."""
    facts = engine_facts(dataclasses.replace(geometry, engine_id=name), role)
    ranks = Ranks([], queue.Queue())
    try:
        for number, worker in enumerate(geometry.workers):
            card = RegisterWorker(card_of(worker, facts), parts=True, outlines=True)
            ranks.readers.append(CardReader(geometry.workers))
            ranks.workers.append(
                KvdSession(_presents(card), _hears(ranks, number), directory=host.directory, name=name)
            )
        if scheduler:
            present = RegisterScheduler(
                engine=facts, incarnation=uuid.uuid4().hex, pid=os.getpid(), digest_key=os.urandom(32)
            )
            one = KvdSession(_presents(present), directory=host.directory, name=name)
            ranks = dataclasses.replace(ranks, scheduler=one)
            one.wait(lambda state: state.connected, SECONDS)
        for session in ranks.workers:
            session.wait(lambda state: bool(state.engine_generation), SECONDS)
        yield ranks
    finally:
        for session in [*ranks.workers, *filter(None, [ranks.scheduler])]:
            session.close()


def _presents(card: RegisterWorker | RegisterScheduler) -> Callable[[], RegisterWorker | RegisterScheduler]:
    return lambda: card


def _hears(ranks: Ranks, number: int) -> Callable[[Message], Message | None]:
    """What a worker does with what kvd tells it unasked."""

    def on_message(message: Message) -> None:
        if isinstance(message, PeerReady):
            note = partial(_note, ranks.told, ranks.readers[number])
            complete(lambda: ranks.workers[number], message, SECONDS, note)

    return on_message


def _note(answers: Answers, reader: CardReader, answer: ToldCard | Cause) -> None:
    """A rank has its answer, and has read all of it that planning and connecting take."""
    if isinstance(answer, ToldCard):
        reader.geometry(answer)
        reader.metadata(answer)
    answers.put((answer, time.perf_counter()))


def _ask(hosts: tuple[Kvd, Kvd], decoders: Ranks, prefillers: Ranks, name: str, waits: Waits) -> None:
    """Ask for the engine: the decoders' scheduler if they have one, else all of them at once."""
    state = prefillers.workers[0].state
    question = GetPeer(
        local_engine="decoder",
        engine_id=name,
        endpoint=Endpoint(state.host, state.port),
        generation=state.engine_generation,
    )
    answers: Answers = queue.Queue()
    if decoders.scheduler is not None:
        answers = decoders.told
    kvds = [host.process.pid for host in hosts]
    pids = [os.getpid(), *kvds]
    gc.freeze()  # all ranks have one heap here: to look through all of it in the midst would stop them for 0.1 s
    try:
        spent, served = processor_seconds(pids), processor_seconds(kvds)
        began = time.perf_counter()
        if decoders.scheduler is not None:
            decoders.scheduler.call(question, SECONDS)
        else:
            for session, reader in zip(decoders.workers, decoders.readers, strict=True):
                ask_for_peer(session, question, SECONDS, partial(_note, answers, reader))
        found = [answers.get(timeout=2 * SECONDS) for _ in decoders.workers]
        waits.whole.append(time.perf_counter() - began)
    finally:
        gc.unfreeze()
    waits.each += [at - began for _, at in found]
    waits.processor.append(processor_seconds(pids) - spent)
    waits.serving.append(processor_seconds(kvds) - served)
    for answer, _ in found:
        if isinstance(answer, Cause):
            raise WorkerFailed(f"a handshake of the benchmark failed: {answer}")
        if answer.generation != state.engine_generation:
            raise WorkerFailed(
                f"a rank was told generation {answer.generation} of {name}, not {question.generation}"
            )
    waits.bytes = _bytes_told(decoders.workers[0], question)


def _bytes_told(session: KvdSession, question: GetPeer) -> int:
    """Bytes of all parts of an answer."""
    told = first = 0
    while True:
        answer = session.call(msgspec.structs.replace(question, first=first), SECONDS).result(SECONDS)
        if not isinstance(answer, PeerReady) or (answer.part is None and answer.outline is None):
            raise WorkerFailed(f"kvd answered the benchmark's handshake with {type(answer).__name__}")
        told += len(msgspec.msgpack.encode(answer))
        if answer.part is None or answer.part.next >= answer.part.total:
            return told
        first = answer.part.next


def processor_seconds(pids: Iterable[int]) -> float:
    """Time that these processes have had on a processor, with all threads that they ever had."""
    # The number of another process's clock is what clock_getcpuclockid(3) gives; /proc/PID/stat counts in 10 ms.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def _wait_prepared(host: Kvd) -> None:
    """Until it has imported what comparing takes: a kvd that runs has done so long before its first handshake."""
    deadline = time.monotonic() + SECONDS
    while True:
        status = host.ask(GetStatus())
        if isinstance(status, KvdStatus) and status.gauges.get("handshakes.prepared", 1.0):
            return
        if time.monotonic() > deadline:
            raise WorkerFailed(f"kvd of host {host.name} was not prepared within {SECONDS:g} s")
        time.sleep(0.02)  # nothing announces it
