"""What the workers here hold of their peers, as operators see it, and the order to give it up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from kvd.geometry.rank import Rank
from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client
from kvd.service.handlers.operators import refuse_no_operator
from kvd.service.handlers.sight import sight_of
from kvd.service.sockets.router import Caller
from kvd.shown import few
from kvd.wire.agent import (
    AgentList,
    AgentRow,
    DropPeer,
    Evicted,
    EvictPeer,
    GetHeld,
    HeldPeer,
    HeldPeers,
    ListAgents,
    PeerState,
)

GONE_SECONDS, LOOK_SECONDS = 2.0, 0.05
"""How long lanes may take to be closed before they count as left, and between two looks whether they are."""
_STATES: dict[str, PeerState] = {"ready": "live", "unreachable": "away", "gone": "gone"}


async def list_agents(daemon: Daemon, caller: Caller, query: ListAgents) -> AgentList:
    """What each worker here holds, engine by engine. A worker that does not answer has a row that says so."""
    sight = await sight_of(daemon, caller)
    workers = _workers(daemon)
    seen = [worker for worker in workers if sight.of(worker.uid)]
    rows = await _rows(daemon, seen, query.engine_id)
    if not query.engine_id:
        rows += [
            AgentRow(engine_id=worker.engine.engine_id, rank=worker.rank, pid=0, hidden=True)
            for worker in workers
            if worker not in seen and worker.rank is not None
        ]
    return AgentList(tuple(sorted(rows, key=_place)))


async def evict_peer(daemon: Daemon, caller: Caller, message: EvictPeer) -> Evicted:
    """Have the workers here give up a peer, or say what that would do. Raises `RequestRefused`: nothing changed."""
    name = message.engine_id + (f"@{message.generation}" if message.generation else "")
    await refuse_no_operator(daemon, caller, f"have lanes to {name} closed")
    workers = _workers(daemon)
    before = _of(await _rows(daemon, workers, message.engine_id), message)
    if all(row.held is None for row in before):
        held = {row.held.engine_id for row in await _rows(daemon, workers) if row.held is not None}
        others = f"; they do of {few(sorted(held))}" if held else ", nor of any other peer"
        raise RequestRefused(
            "KVD-EVICT-UNKNOWN",
            f"no worker here holds anything of {name}{others}",
            hint="`kvctl agents` lists what they hold; it may have been given up meanwhile",
        )
    busy = [row for row in before if row.held is not None and row.held.loads]
    if busy and not message.force:
        loads = sum(row.held.loads for row in busy if row.held is not None)
        who = few([f"{row.engine_id}/{row.rank}" for row in busy], count=len(busy))
        raise RequestRefused(
            "KVD-EVICT-BUSY",
            f"{loads} loads of {name} are under way at {who}",
            hint="try again when they are over, or make them misses with --force: their prompts are computed again",
        )
    if not message.carry_out:
        return Evicted(before=before, left=before, carried_out=False)
    daemon.counters["orders.evictions"] += 1
    daemon.events.emit(
        "order.evict", message.engine_id, generation=message.generation, uid=caller.uid, pid=caller.pid,
        workers=len({(row.engine_id, row.rank) for row in before}), force=message.force,
    )  # fmt: skip
    cause = f"an operator had its lane closed (uid {caller.uid}, pid {caller.pid})"
    order = DropPeer(
        engine_id=message.engine_id, generation=message.generation, force=message.force, cause=cause
    )
    holding = {(row.engine_id, row.rank) for row in before if row.held is not None}
    asked = [worker for worker in workers if (worker.engine.engine_id, worker.rank) in holding]
    await asyncio.gather(*(_told(daemon, worker, order) for worker in asked))
    return Evicted(before=before, left=await _left(daemon, asked, before, message), carried_out=True)


async def _left(
    daemon: Daemon, asked: list[Client], before: tuple[AgentRow, ...], message: EvictPeer
) -> tuple[AgentRow, ...]:
    """What is still held once lanes had their time to be closed. What was made anew meanwhile counts as well."""
    until = time.monotonic() + GONE_SECONDS
    mute = tuple(row for row in before if row.held is None)
    while True:
        rows = await _rows(daemon, asked, message.engine_id)
        left = (*_of(rows, message), *mute)
        if len(left) == len(mute) or time.monotonic() > until:
            return left
        await asyncio.sleep(LOOK_SECONDS)


def _workers(daemon: Daemon) -> list[Client]:
    """The workers whose processes are on this host; of an engine of several hosts each kvd asks its own."""
    clients = daemon.registry.clients.values()
    return [one for one in clients if one.kind == "worker" and one.at is None and one.state != "gone"]


async def _rows(daemon: Daemon, workers: Iterable[Client], engine_id: str = "") -> list[AgentRow]:
    """What workers hold, of one peer where that is named; without one, a row also for a worker that holds nothing."""
    asked = list(workers)
    answers = await asyncio.gather(*(_told(daemon, worker, GetHeld()) for worker in asked))
    rows: list[AgentRow] = []
    for worker, answer in zip(asked, answers, strict=True):
        if worker.rank is None:
            continue
        row = AgentRow(
            engine_id=worker.engine.engine_id,
            rank=worker.rank,
            pid=worker.pid,
            backend=worker.card.backend if worker.card else "",
            regions=worker.regions,
            registered_bytes=worker.registered_bytes,
        )
        if isinstance(answer, str):
            rows.append(msgspec.structs.replace(row, trouble=answer))
            continue
        held = [one for one in answer.peers if engine_id in ("", one.engine_id)]
        rows += [_with_state(daemon, row, one) for one in held]
        if not held and not engine_id:
            rows.append(row)
    return rows


async def _told(daemon: Daemon, worker: Client, message: GetHeld | DropPeer) -> HeldPeers | str:
    """A worker's answer, or why there is none."""
    try:
        return await ask_client(daemon, worker, message, HeldPeers)
    except RequestRefused as refusal:
        if refusal.code == "KVD-NOT-TAKEN":
            return "its connector is of an earlier version, and does not tell"
        return refusal.message


def _of(rows: Iterable[AgentRow], message: EvictPeer) -> tuple[AgentRow, ...]:
    """Those of the generation that is meant, and of workers that do not tell."""
    return tuple(
        row
        for row in rows
        if row.trouble or (row.held is not None and message.generation in ("", row.held.generation))
    )


def _with_state(daemon: Daemon, row: AgentRow, held: HeldPeer) -> AgentRow:
    """With what is known here of that generation of the peer."""
    state, since, reason = _state_of(daemon, held)
    return msgspec.structs.replace(row, held=held, state=state, since=since, reason=reason)


def _state_of(daemon: Daemon, held: HeldPeer) -> tuple[PeerState, float, str]:
    known = daemon.handshakes.peers.named(held.engine_id).values()
    for peer in known:
        if peer.card.generation == held.generation:
            if held.ended and peer.state != "gone":
                return "gone", 0.0, "the worker sees that its process has ended"
            return _STATES[peer.state], peer.since, peer.reason
    local = daemon.registry.engines.get(held.engine_id)
    if local is not None and local.state == "ready" and local.generation == held.generation:
        return "live", local.since, ""
    for peer in known:
        if peer.state == "ready":
            return "gone", peer.since, f"it restarted as generation {peer.card.generation}"
    if held.ended:
        return "gone", 0.0, "the worker sees that its process has ended"
    return "unknown", 0.0, "this kvd knows nothing of that generation"


def _place(row: AgentRow) -> tuple[str, Rank, str, str]:
    held = row.held
    return row.engine_id, row.rank, held.engine_id if held else "", held.generation if held else ""
