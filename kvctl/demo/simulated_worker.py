"""One worker of a simulated engine, a process: `python -m kvctl.processes.tied PARENT kvctl.demo.simulated_worker`.

It is what runs in a vLLM worker, `kvd.worker`, on memory of its own. The first worker of an engine is its scheduler as
well, as far as that takes: it keeps leases, claims those of others, and orders the loads.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from kvctl.bench import pattern
from kvctl.bench.memory import Memory, place
from kvctl.demo.simulated_model import simulated_geometry
from kvctl.engines.cards import engine_facts
from kvctl.processes.commands import JsonCommand, JsonResult, serve
from kvd.backends.registry import open_backend
from kvd.client.session import KvdSession
from kvd.topology.blocks import BlockList
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint, EngineFacts, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseEnded, LeaseExtend, LeaseOpened, LeaseRelease
from kvd.wire.registration import OpenLease, RegisterScheduler
from kvd.wire.reply import Ok
from kvd.worker.cause import Cause, text_of
from kvd.worker.orders import LoadOrder, StepOrders, plain
from kvd.worker.remote import RemotePrefill
from kvd.worker.settings import ONE_HOST, ConnectorSettings, home_kvd
from kvd.worker.worker import WorkerHalf

ANSWER_SECONDS = 20.0
LEASE_SECONDS = 30.0
LOOK_SECONDS = 1.0

Answer = TypeVar("Answer", bound=Message)


@dataclass(slots=True)
class SimulatedScheduler:
    """The session of an engine's first worker as its scheduler; ``leases``: when each ends, in monotonic seconds."""

    session: KvdSession
    leases: dict[str, float]

    def ask(self, message: Message, answer: type[Answer]) -> Answer:
        """Ask kvd. Raises `TypeError` for an answer of another kind, `ClientError` for none."""
        got = self.session.call(message, ANSWER_SECONDS).result()
        if not isinstance(got, answer):
            raise TypeError(f"kvd answered {type(message).__name__} with {type(got).__name__}")
        return got


@dataclass(slots=True)
class SimulatedWorker:
    """What this process is and has."""

    memory: Memory
    half: WorkerHalf
    scheduler: SimulatedScheduler | None

    def scheduling(self) -> SimulatedScheduler:
        """The engine's scheduler. Raises `RuntimeError` in another worker than the first."""
        if self.scheduler is None:
            raise RuntimeError("only the engine's first worker is its scheduler")
        return self.scheduler


def _begin(who: JsonCommand) -> tuple[SimulatedWorker, JsonResult]:
    """Register the memory with the backend, the worker with kvd, and for rank 0 the scheduler as well."""
    rank, directory = who["rank"], who["runtime_dir"]
    engine = simulated_geometry(who["engine_id"], who["ranks"], who["blocks"], who.get("stages", 1))
    facts = engine_facts(engine, who["role"])
    memory = place(engine.workers[rank])
    settings = ConnectorSettings(backend=who["backend"], home=who.get("home", ONE_HOST))
    half = WorkerHalf(
        settings,
        facts,
        memory.geometry,
        tuple(worker for worker in engine.workers if worker.rank.pp == memory.geometry.rank.pp),
        open_backend(who["backend"], f"{facts.engine_id}-tp{rank}", {}),
        lambda card, on_message: KvdSession(card, on_message, directory=directory, name=f"worker-{rank}"),
        memory=memory,
    )
    return SimulatedWorker(memory, half, None if rank else _scheduler(facts, settings, directory)), {}


def _scheduler(facts: EngineFacts, settings: ConnectorSettings, directory: str) -> SimulatedScheduler:
    """Registered, once kvd knows all workers of the engine: it has a generation then."""
    incarnation = uuid.uuid4().hex
    leases: dict[str, float] = {}

    def card() -> RegisterScheduler:
        now = time.monotonic()
        return RegisterScheduler(
            engine=facts,
            incarnation=incarnation,
            pid=os.getpid(),
            leases=tuple(OpenLease(name, max(0.0, end - now)) for name, end in leases.copy().items()),
            home=home_kvd(settings.home),
        )

    def on_message(message: Message) -> Message | None:
        if isinstance(message, LeaseEnded):
            leases.pop(message.request_id, None)
        if not isinstance(message, LeaseExtend):
            return None
        left = leases.get(message.request_id, 0.0) - time.monotonic()
        return LeaseClaimed(request_id=message.request_id, seconds=max(0.0, left))

    session = KvdSession(card, on_message, directory=directory, name="scheduler")
    session.wait(lambda state: bool(state.engine_generation), ANSWER_SECONDS)
    return SimulatedScheduler(session, leases)


def _fill(worker: SimulatedWorker, command: JsonCommand) -> JsonResult:
    """Prefill: put the request's bytes into its blocks."""
    pattern.fill(worker.memory, _blocks(command["blocks"]), command["request"])
    return {}


def _offer(worker: SimulatedWorker, command: JsonCommand) -> JsonResult:
    """As the scheduler: keep the blocks for a decoder, and say where it finds them."""
    scheduler, request, blocks = worker.scheduling(), command["request"], command["blocks"]
    engine_id, state = worker.half.engine.engine_id, scheduler.session.state
    scheduler.leases[request] = time.monotonic() + LEASE_SECONDS
    lease = OpenLease(request, LEASE_SECONDS, sum(map(len, blocks)))
    scheduler.ask(LeaseOpened(engine_id=engine_id, leases=(lease,)), Ok)
    prefill = RemotePrefill(
        engine_id=engine_id,
        request_id=request,
        generation=state.engine_generation,
        host=state.host,
        port=state.port,
        tokens=command["tokens"],
        blocks=tuple(map(tuple, blocks)),
        first_blocks=(0,) * len(blocks),
        lease_seconds=LEASE_SECONDS,
        lease_opened=time.time(),
    )
    return {"prefill": msgspec.to_builtins(prefill)}


def _load(worker: SimulatedWorker, command: JsonCommand) -> JsonResult:
    """Decode's first step: claim the lease, read what another engine prefilled, release, compare every byte."""
    scheduler, blocks = worker.scheduling(), _blocks(command["blocks"])
    prefill = msgspec.convert(command["prefill"], RemotePrefill)
    endpoint, reader, claimed = Endpoint(prefill.host, prefill.port), uuid.uuid4().hex, time.monotonic()
    key = LeaseKey(engine_id=prefill.engine_id, request_id=prefill.request_id, endpoint=endpoint)
    lease = scheduler.ask(LeaseClaim(key=key, reader=reader), LeaseClaimed)
    if lease.seconds <= 0:
        raise RuntimeError(f"no lease on {prefill.request_id}: {lease.reason}")
    order = LoadOrder(
        request_id=command["request"],
        prefill=prefill,
        groups=plain(blocks),
        tokens=prefill.tokens,
        seconds=min(lease.seconds, ANSWER_SECONDS),
        claimed=claimed,
    )
    cause = _step(worker.half, order)
    scheduler.ask(LeaseRelease(key=key, reader=reader, result="miss" if cause else "done"), Ok)
    if cause:
        raise RuntimeError(text_of(cause))
    return {"difference": pattern.first_difference(worker.memory, blocks, prefill.request_id, prefill.tokens)}


def _step(half: WorkerHalf, order: LoadOrder) -> Cause | None:
    """One load in steps that compute nothing; None where it came, else why it did not."""
    orders = StepOrders(loads=[order], idle=True)
    while True:
        half.bound(orders)
        half.start(orders)
        half.stepped()
        if order.request_id in half.results(LOOK_SECONDS).received:
            outcomes = half.outcomes()
            return outcomes.loads[order.request_id] if outcomes else None
        orders = StepOrders(idle=True)


def _end(worker: SimulatedWorker) -> None:
    worker.half.close()
    if worker.scheduler is not None:
        worker.scheduler.session.close()


def _blocks(ids: list[list[int]]) -> dict[int, BlockList]:
    return {group: BlockList(0, np.array(of, np.int64)) for group, of in enumerate(ids)}


if __name__ == "__main__":
    serve(_begin, {"fill": _fill, "offer": _offer, "load": _load}, _end)
