"""The handshake measured: simulated workers of two engines, two real kvds, all decoding ranks asking at once.

The workers are sessions of this process; what they present has the engines' geometries and transfer metadata of usual
size, and they ask as the connector's workers do (`kvd.worker.handshake`). They move nothing, and touch no kvd but the
two that are started here.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from kvctl.engines.cards import engine_facts
from kvctl.processes.daemons import Kvd, two_hosts
from kvctl.processes.errors import WorkerFailed
from kvd.client.errors import ClientError
from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts, WorkerCard
from kvd.wire.query import GetStatus, KvdStatus
from kvd.wire.registration import RegisterWorker
from kvd.worker.cause import Cause
from kvd.worker.handshake import ask_for_peer

if TYPE_CHECKING:
    from kvd.geometry.model import EngineGeometry, WorkerGeometry

SECONDS = 120.0
"""For anything to happen."""
METADATA_BYTES = 332, 44
"""What NIXL exports of a worker, and more of it for each region."""

Case = Literal["cold", "warm", "replica", "restart"]
CASES: tuple[Case, ...] = get_args(Case)
"""In the order in which a round has them.

cold     both kvds have just started: no link, no engine, nothing compared
warm     the decoders' kvd knows the engine; a worker that was handed it does not even ask
replica  another engine with the same geometry, which no one here has heard of
restart  the first engine again, with new workers
"""


@dataclass(slots=True)
class Waits:
    """Seconds of all rounds: what each rank waited, and until all of a round had their answer; bytes of one answer.

    ``processor`` is the time on a processor that a round took of the kvds and of this process, the workers.
    """

    each: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    bytes: int = 0


def measure(
    pair: tuple[EngineGeometry, EngineGeometry],
    rounds: int,
    folder: Path,
    told: Callable[[], None] = lambda: None,
) -> dict[Case, Waits]:
    """The waits of the first engine's ranks for the second engine; ``told`` is called after each round.

    Raises `WorkerFailed` where an answer is none, and what starting kvds raises.
    """
    found: dict[Case, Waits] = {case: Waits() for case in CASES}
    try:
        for _ in range(rounds):
            with two_hosts(folder) as hosts:
                _round(hosts, pair, found)
            told()
    except ClientError as error:
        raise WorkerFailed(f"a handshake of the benchmark failed: {error.message}") from None
    return found


def _round(
    hosts: tuple[Kvd, Kvd], pair: tuple[EngineGeometry, EngineGeometry], found: dict[Case, Waits]
) -> None:
    far, near = hosts
    for host in hosts:
        _wait_prepared(host)
    local, remote = pair
    with registered(near, local, "decode", "decoder") as decoders:
        with registered(far, remote, "prefill", "one") as there:
            _ask(hosts, decoders, there, "one", found["cold"])
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
    host: Kvd, geometry: EngineGeometry, role: Literal["prefill", "decode"], name: str
) -> Iterator[list[KvdSession]]:
    """The sessions of all workers of an engine, when it is complete."""
    facts = engine_facts(dataclasses.replace(geometry, engine_id=name), role)
    sessions: list[KvdSession] = []
    try:
        for worker in geometry.workers:
            presented = RegisterWorker(card_of(worker, facts), parts=True)
            sessions.append(KvdSession(lambda it=presented: it, directory=host.directory, name=name))  # type: ignore[misc]
        for session in sessions:
            session.wait(lambda state: bool(state.engine_generation), SECONDS)
        yield sessions
    finally:
        for session in sessions:
            session.close()


def _ask(
    hosts: tuple[Kvd, Kvd], decoders: list[KvdSession], prefillers: list[KvdSession], name: str, waits: Waits
) -> None:
    """All decoding ranks ask for the engine at once."""
    state = prefillers[0].state
    question = GetPeer(
        local_engine="decoder",
        engine_id=name,
        endpoint=Endpoint(state.host, state.port),
        generation=state.engine_generation,
    )
    ended: list[float] = []
    pids = [os.getpid(), *(host.process.pid for host in hosts)]
    spent = processor_seconds(pids)
    began = time.perf_counter()
    answers: queue.Queue[EngineCard | Cause] = queue.Queue()

    def answered(answer: EngineCard | Cause) -> None:
        ended.append(time.perf_counter() - began)
        answers.put(answer)

    for session in decoders:
        ask_for_peer(session, question, SECONDS, answered)
    found = [answers.get(timeout=2 * SECONDS) for _ in decoders]
    waits.whole.append(time.perf_counter() - began)
    waits.each += ended
    waits.processor.append(processor_seconds(pids) - spent)
    for answer in found:
        if isinstance(answer, Cause):
            raise WorkerFailed(f"a handshake of the benchmark failed: {answer}")
    waits.bytes = _bytes_told(decoders[0], question)


def _bytes_told(session: KvdSession, question: GetPeer) -> int:
    """Bytes of all parts of an answer."""
    told = first = 0
    while True:
        answer = session.call(msgspec.structs.replace(question, first=first), SECONDS).result(SECONDS)
        if not isinstance(answer, PeerReady) or answer.part is None:
            raise WorkerFailed(f"kvd answered the benchmark's handshake with {type(answer).__name__}")
        told += len(msgspec.msgpack.encode(answer))
        first = answer.part.next
        if first >= answer.part.total:
            return told


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
