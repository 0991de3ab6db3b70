"""One worker of a simulated engine, a process: `python -m kvctl.processes.tied PARENT kvctl.demo.simulated_worker`.

It does what the connector does inside a vLLM worker, on memory of its own: registers it with a backend and with kvd,
asks kvd for a peer, claims the lease, plans, reads, reports. The first worker of an engine is its scheduler as well.
Orders come as JSON lines on stdin, the first says who this is; one JSON line on stdout answers each.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import numpy as np

from kvctl.demo.simulated_cache import (
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    MODEL,
    PERIOD,
    Cache,
    fill,
    first_difference,
    make_cache,
    sibling_geometries,
)
from kvd.backends.contract import Backend, Lane, State, Transfer
from kvd.backends.registry import open_backend
from kvd.client.cards import engine_geometry
from kvd.client.records import block_runs
from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.descriptors import Descriptors
from kvd.topology.plan import Plan, plan_worker
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineFacts, LeaseKey, WorkerCard
from kvd.wire.lease import (
    LeaseClaim,
    LeaseClaimed,
    LeaseEnded,
    LeaseExtend,
    LeaseOpened,
    LeaseRelease,
)
from kvd.wire.registration import OpenLease, RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok
from kvd.wire.transfer import GroupShare, ReportTransfers, TransferRecord

ANSWER_SECONDS = 20.0
LEASE_SECONDS = 30.0
POLL_SECONDS = 50e-6

Reply = TypeVar("Reply", bound=Message)
Orders = dict[str, Any]


@dataclass(slots=True)
class Peer:
    """A peer engine: the plan to read from it and the lane to read by."""

    generation: str
    plan: Plan
    lane: Lane


@dataclass(slots=True)
class Worker:
    """What this process is and has. ``leases`` are those of the scheduler: when each ends, in monotonic seconds."""

    facts: EngineFacts
    cache: Cache
    backend: str
    home: Backend
    session: KvdSession
    incarnation: str
    scheduler: KvdSession | None
    leases: dict[str, float]
    peers: dict[str, Peer] = field(default_factory=dict)


def main() -> None:
    """Serve orders until stdin ends."""
    # Whatever a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _open(json.loads(sys.stdin.readline()))
    try:
        _say(answers, {})
        for line in sys.stdin:
            _say(answers, _obey(worker, json.loads(line)))
    finally:
        for peer in worker.peers.values():
            peer.lane.close()
        worker.session.close()
        if worker.scheduler is not None:
            worker.scheduler.close()
        worker.home.close()


def _say(answers: IO[str], answer: Orders) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _obey(worker: Worker, orders: Orders) -> Orders:
    """Do what the orders say. A request that fails is told of, and the worker goes on."""
    try:
        return _DEEDS[orders["do"]](worker, orders)
    except Exception as error:  # noqa: BLE001 - it fails this request, whatever it is
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _open(who: Orders) -> Worker:
    """Register the memory with the backend, the worker with kvd, and for rank 0 the scheduler as well."""
    rank, ranks = who["rank"], who["ranks"]
    cache = make_cache(who["blocks"], rank, ranks)
    facts = EngineFacts(
        engine_id=who["engine_id"],
        model=MODEL,
        role=who["role"],
        tp=ranks,
        groups=PERIOD,
        world_size=ranks,
        facts={
            "dtype": "bfloat16",
            "cache_dtype": "auto",
            "kv_heads": KV_HEADS,
            "head_size": HEAD_SIZE,
            "layers": LAYERS,
            "transfer_mode": "pull",
        },
    )
    home = open_backend(who["backend"], f"{facts.engine_id}-tp{rank}", {})
    home.register(cache.geometry.regions)
    incarnation = uuid.uuid4().hex
    card = WorkerCard(
        engine=facts,
        rank=Rank(rank),
        incarnation=incarnation,
        pid=os.getpid(),
        host=socket.gethostname(),
        backend=who["backend"],
        geometry=encode_worker(cache.geometry),
        metadata=home.metadata(),
    )
    directory = who["runtime_dir"]
    session = KvdSession(lambda: RegisterWorker(card), directory=directory, name=f"worker-{rank}")
    leases: dict[str, float] = {}
    scheduler = _scheduler(facts, leases, directory) if rank == 0 else None
    worker = Worker(facts, cache, who["backend"], home, session, incarnation, scheduler, leases)
    # The generation is there once kvd knows all workers of the engine.
    (scheduler or session).wait(lambda state: bool(state.engine_generation), ANSWER_SECONDS)
    return worker


def _scheduler(facts: EngineFacts, leases: dict[str, float], directory: str) -> KvdSession:
    incarnation = uuid.uuid4().hex

    def card() -> RegisterScheduler:
        now = time.monotonic()
        return RegisterScheduler(
            engine=facts,
            incarnation=incarnation,
            pid=os.getpid(),
            leases=tuple(OpenLease(name, max(0.0, end - now)) for name, end in leases.copy().items()),
        )

    def pushed(message: Message) -> Message | None:
        if isinstance(message, LeaseEnded):
            leases.pop(message.request_id, None)
        if not isinstance(message, LeaseExtend):
            return None
        left = leases.get(message.request_id, 0.0) - time.monotonic()
        return LeaseClaimed(request_id=message.request_id, seconds=max(0.0, left))

    return KvdSession(card, pushed, directory=directory, name="scheduler")


def _fill(worker: Worker, orders: Orders) -> Orders:
    """Prefill: put the request's bytes into its blocks."""
    return {"bytes": fill(worker.cache, _blocks(orders["blocks"]), orders["request"])}


def _offer(worker: Worker, orders: Orders) -> Orders:
    """As the scheduler: keep the blocks for a decoder, and say where it finds them."""
    session = worker.scheduler
    if session is None:
        raise RuntimeError("only the engine's first worker is its scheduler")
    request = orders["request"]
    worker.leases[request] = time.monotonic() + LEASE_SECONDS
    lease = OpenLease(request, LEASE_SECONDS, sum(map(len, orders["blocks"])))
    _ask(session, LeaseOpened(engine_id=worker.facts.engine_id, leases=(lease,)), Ok)
    state = session.state
    return {
        "engine_id": worker.facts.engine_id,
        "request": request,
        "generation": state.engine_generation,
        "host": state.host,
        "port": state.port,
        "blocks": orders["blocks"],
        "tokens": orders["tokens"],
    }


def _load(worker: Worker, orders: Orders) -> Orders:
    """Decode's first step: read what another engine prefilled, compare every byte, report, release."""
    source, started = orders["source"], time.time()
    endpoint = Endpoint(source["host"], source["port"])
    key = LeaseKey(engine_id=source["engine_id"], request_id=source["request"], endpoint=endpoint)
    reader = uuid.uuid4().hex
    asking = time.monotonic()
    peer, cached = _peer(worker, source, endpoint)
    handshake = 0.0 if cached else time.monotonic() - asking
    claimed = _ask(worker.session, LeaseClaim(key=key, reader=reader), LeaseClaimed)
    if claimed.seconds <= 0:
        raise RuntimeError(f"no lease on {source['request']}: {claimed.reason}")
    blocks, planning = _blocks(orders["blocks"]), time.monotonic()
    rows = compile_plan(peer.plan, blocks, _blocks(source["blocks"]), tokens=source["tokens"])
    posting = time.monotonic()
    transfers = [peer.lane.submit(str(peer.plan.remote_ranks[at]), part) for at, part in rows.items()]
    posted = time.monotonic()
    _wait(peer.lane, transfers)
    stages = {
        "queued": 0.0,
        "handshake": handshake,
        "plan": posting - planning,
        "post": posted - posting,
        "wire": time.monotonic() - posted,
    }
    backend = next((t.backend for t in transfers if t.backend), worker.backend)
    moved = (peer.plan, rows, blocks)
    record = _record(worker, orders, moved, backend=backend, started=started, stages=stages)
    _ask(worker.session, ReportTransfers(incarnation=worker.incarnation, records=(record,)), Ok)
    _ask(worker.session, LeaseRelease(key=key, reader=reader), Ok)
    return {"difference": first_difference(worker.cache, blocks, source["request"])}


def _peer(worker: Worker, source: Orders, endpoint: Endpoint) -> tuple[Peer, bool]:
    """The engine to read from, and whether it was known: kvd is asked for each request, plan and lane are kept."""
    ready = _ask(
        worker.session,
        GetPeer(
            local_engine=worker.facts.engine_id,
            engine_id=source["engine_id"],
            endpoint=endpoint,
            generation=source["generation"],
        ),
        PeerReady,
    )
    known = worker.peers.get(source["engine_id"])
    if known is not None and known.generation == ready.peer.generation:
        return known, True
    siblings = sibling_geometries(worker.cache, worker.facts.tp)
    plan = plan_worker(worker.cache.geometry, siblings, engine_geometry(ready.peer).workers)
    lane = worker.home.lane(source["engine_id"])
    for at in plan.sources:
        lane.add(str(plan.remote_ranks[at]), ready.peer.workers[at].metadata)
    if known is not None:
        known.lane.close()
    worker.peers[source["engine_id"]] = Peer(ready.peer.generation, plan, lane)
    return worker.peers[source["engine_id"]], False


def _record(
    worker: Worker,
    orders: Orders,
    moved: tuple[Plan, dict[int, Descriptors], dict[int, BlockList]],
    *,
    backend: str,
    started: float,
    stages: dict[str, float],
) -> TransferRecord:
    """What the ledger keeps of a load. ``moved`` is the plan, its descriptors, this side's blocks."""
    plan, rows, blocks = moved
    geometry, source = worker.cache.geometry, orders["source"]
    shares = []
    for group in geometry.groups:
        count = len(blocks[group.index].ids)
        content = sum(layer.page.content for layer in group.layers)
        shares.append(GroupShare(group.index, group.kind, count, count * content))
    return TransferRecord(
        transfer_id=f"{orders['request']}@{geometry.rank}",
        request_id=orders["request"],
        local_engine=worker.facts.engine_id,
        local_rank=str(geometry.rank),
        remote_engine=source["engine_id"],
        remote_generation=source["generation"],
        remote_request_id=source["request"],
        backend=backend,
        mode="pull",
        state="done",
        started=started,
        tokens=source["tokens"],
        bytes=sum(part.nbytes for part in rows.values()),
        descriptors=sum(
            len(read.layers) * read.layer_segments * len(blocks[read.group].ids) for read in plan.reads
        ),
        coalesced_descriptors=sum(map(len, rows.values())),
        remote_ranks=tuple(str(plan.remote_ranks[at]) for at in sorted(rows)),
        groups=tuple(shares),
        stages=stages,
        local_blocks=block_runs(blocks),
        remote_blocks=block_runs(_blocks(source["blocks"])),
    )


def _wait(lane: Lane, transfers: list[Transfer]) -> None:
    """Poll until all are done. Raises `RuntimeError` for one that failed or does not end."""
    until = time.monotonic() + ANSWER_SECONDS
    for transfer in transfers:
        while (state := lane.poll(transfer)) is not State.DONE:
            if state is State.FAILED or time.monotonic() > until:
                raise RuntimeError(f"reading from {transfer.peer}: {transfer.reason or 'it does not end'}")
            time.sleep(POLL_SECONDS)


def _ask(session: KvdSession, message: Message, answer: type[Reply]) -> Reply:
    got = session.call(message, ANSWER_SECONDS).result()
    if not isinstance(got, answer):
        raise TypeError(f"kvd answered {type(message).__name__} with {type(got).__name__}")
    return got


def _blocks(ids: list[list[int]]) -> dict[int, BlockList]:
    return {group: BlockList(0, np.array(of, np.int64)) for group, of in enumerate(ids)}


_DEEDS: dict[str, Callable[[Worker, Orders], Orders]] = {"fill": _fill, "offer": _offer, "load": _load}


if __name__ == "__main__":
    main()
