"""Operators' orders to a local engine: who may give them, the way to the engine's scheduler, what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Iterable

import msgspec

from kvd.geometry.alike import AlikeReader
from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.engines.miss_history import LONGEST_CAUSE, OrderHistory
from kvd.service.errors import RequestRefused
from kvd.service.handlers.forwarding import ask_client
from kvd.service.handlers.operators import permitted
from kvd.service.handlers.senders import scheduler_of
from kvd.service.handlers.sight import sight_of
from kvd.service.sockets.router import Caller
from kvd.shown import few
from kvd.wire.limits import LONGEST_ID
from kvd.wire.order import (
    MISS_ENDS,
    Asker,
    ClearForced,
    ForcedCleared,
    ForcedMisses,
    ForceMiss,
    ForcePlan,
    GetForced,
    LoadPart,
    Miss,
    NextLoads,
    OneRequest,
    OrderState,
    ReportForced,
)
from kvd.wire.reply import Ok

SCHEDULER_ANSWER_SECONDS = 3.0
"""What a scheduler may take to answer. It answers between two steps of Python, not of the model."""
STOPPED = "the engine may be stopped: see `kvctl workers`"
LONGEST_WAIT = 30.0
"""Seconds that a question for changes is kept at most."""
MAX_ORDER_ID = 64
MAX_SECONDS = 7 * 86400.0


async def force_miss(daemon: Daemon, caller: Caller, message: ForceMiss) -> ForcePlan:
    """Have an engine's loads miss, or say what that would do. Raises `RequestRefused`, and then nothing has changed."""
    asker = Asker(order_id=uuid.uuid4().hex[:12], uid=caller.uid, pid=caller.pid)
    message = msgspec.structs.replace(message, asker=asker)
    try:
        _check(message)
        engine, scheduler = await permitted(daemon, caller, message.engine_id)
        await _check_part(engine, message.part)
        plan = await ask_client(daemon, scheduler, message, ForcePlan, SCHEDULER_ANSWER_SECONDS, STOPPED)
    except RequestRefused as refusal:
        daemon.counters["orders.refused"] += 1
        daemon.events.emit(
            "order.refused", message.engine_id, order=asker.order_id, uid=asker.uid, pid=asker.pid,
            code=refusal.code, cause=refusal.message[:LONGEST_CAUSE],
        )  # fmt: skip
        raise
    if not plan.carried_out:
        daemon.counters["orders.planned"] += 1
        return plan
    daemon.counters["orders.taken"] += 1
    daemon.events.emit(
        "order.force_miss", message.engine_id, order=asker.order_id, uid=asker.uid, pid=asker.pid,
        target=kind_of_target(message), when=message.when, requests=len(plan.requests),
    )  # fmt: skip
    more = isinstance(message.target, NextLoads)
    daemon.miss_history.learn(
        OrderState(
            asker=asker, engine_id=message.engine_id, incarnation=scheduler.incarnation, asked=time.time(), open=more,
            looked=0, taken=len(plan.requests), plan=plan,
        ),
        scheduler.uid,
    )  # fmt: skip
    return plan


async def clear_forced(daemon: Daemon, caller: Caller, message: ClearForced) -> ForcedCleared:
    """End orders for further loads. Raises `RequestRefused`."""
    _, scheduler = await permitted(daemon, caller, message.engine_id)
    asker = Asker(order_id=message.order_id, uid=caller.uid, pid=caller.pid)
    message = msgspec.structs.replace(message, asker=asker)
    cleared = await ask_client(daemon, scheduler, message, ForcedCleared, SCHEDULER_ANSWER_SECONDS, STOPPED)
    for order_id in cleared.order_ids:
        daemon.events.emit("order.cleared", message.engine_id, order=order_id, uid=caller.uid, pid=caller.pid)
    return cleared


def report_forced(daemon: Daemon, caller: Caller, message: ReportForced) -> Ok:
    """A scheduler says how far it is. Raises `RequestRefused` for anyone else, and for an order to another engine."""
    order, miss = message.order, message.miss
    scheduler = scheduler_of(daemon, caller, order.engine_id)
    _check_report(daemon, scheduler, order)
    before = daemon.miss_history.learn(order, scheduler.uid, miss)
    if miss is not None and (before is None or _rank(miss) > _rank(before)):
        daemon.counters[f"miss.{miss.state}"] += 1
        daemon.events.emit(
            f"miss.{miss.state}", miss.request_id, engine=order.engine_id, order=order.asker.order_id,
            uid=order.asker.uid, pid=order.asker.pid, seconds=max(miss.steps.values(), default=0.0),
            cause=miss.cause[:LONGEST_CAUSE],
        )  # fmt: skip
    return Ok()


def _check_report(daemon: Daemon, scheduler: Client, order: OrderState) -> None:
    """Raise `RequestRefused` for what would change what is known of another engine's order, or of who gave this one."""
    order_id = order.asker.order_id
    if not 0 < len(order_id) <= MAX_ORDER_ID:
        raise RequestRefused(
            "KVD-BAD-ORDER",
            f"the order's id has {len(order_id)} characters, wanted are 1 to {MAX_ORDER_ID}",
            final=True,
        )
    if order.incarnation != scheduler.incarnation:
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{scheduler.name} is incarnation {scheduler.incarnation}, and reports for {order.incarnation}",
            hint="a scheduler reports of orders that were given to it",
            final=True,
        )
    known = daemon.miss_history.get(order_id)
    if known is not None and (known.order.engine_id, known.order.asker) != (order.engine_id, order.asker):
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"order {order_id} was given to engine {known.order.engine_id!r} by {known.order.asker}, and"
            f" {scheduler.name} reports of one by {order.asker}",
            hint="a scheduler reports of orders that were given to it",
            final=True,
        )


async def get_forced(daemon: Daemon, caller: Caller, message: GetForced) -> ForcedMisses:
    """What became of an order, as soon as that is news to the one who asks. Raises `RequestRefused`."""
    sight = await sight_of(daemon, caller)
    history = daemon.miss_history.get(message.order_id)
    if history is not None and not sight.of(history.uid):
        mine = (one for one in daemon.miss_history.newest() if sight.of(one.uid))
        history = None if message.order_id else next(mine, None)
    if history is None:
        raise RequestRefused(
            "KVD-ORDER-UNKNOWN",
            f"no order {message.order_id!r} is known here" if message.order_id else "no order was given yet",
            hint="kvd keeps the newest ones until it is restarted; `kvctl transfers` has the misses themselves",
        )
    seconds = message.seconds if math.isfinite(message.seconds) else 0.0
    if history.revision == message.revision and seconds > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LONGEST_WAIT)):
                await history.changed.wait()
    return _forced(daemon, history)


def kind_of_target(message: ForceMiss) -> str:
    """What an order is about, in a word or two."""
    target = message.target
    if isinstance(target, OneRequest):
        return f"request {target.request_id}"
    if isinstance(target, NextLoads):
        return f"next {target.count or 'loads'}"
    return "waiting"


# --- what is refused ---


def _check(message: ForceMiss) -> None:
    target = message.target
    if isinstance(target, OneRequest) and not 0 < len(target.request_id) <= LONGEST_ID:
        raise RequestRefused(
            "KVD-BAD-ORDER",
            f"the request id has {len(target.request_id)} characters, wanted are 1 to {LONGEST_ID}",
        )
    if not isinstance(target, NextLoads):
        return
    wrong = ""
    if not 0 < target.ratio <= 1:
        wrong = f"the ratio is {target.ratio}, wanted is more than 0 and at most 1"
    elif target.count < 0:
        wrong = f"the next {target.count} loads cannot miss: wanted is 0 or more"
    elif not 0 < target.seconds <= MAX_SECONDS:
        wrong = f"{target.seconds} s is no time for an order, wanted are up to {MAX_SECONDS:g}"
    if wrong:
        raise RequestRefused("KVD-BAD-ORDER", wrong)


async def _check_part(engine: LocalEngine, part: LoadPart) -> None:
    """An order for a layer, group or rank that the engine does not have would take loads and never make one miss."""
    workers = [w for w in engine.workers.values() if part.rank in (None, w.rank)]
    if not workers:
        have = few(map(str, engine.ranks), count=len(engine.ranks))
        wanted = str(part.rank) if part.rank else "worker"
        raise RequestRefused("KVD-FORCE-PART", f"{engine.facts.engine_id} has no {wanted}; it has {have}")
    if part.group is None and not part.layer:
        return
    found = await asyncio.to_thread(_layers, [worker.card.geometry for worker in workers if worker.card])
    if any(part.group in (None, group) and part.layer in ("", layer) for layer, group in found.items()):
        return
    what = f"layer {part.layer!r}" if part.layer else ""
    what += (" in " if what else "") + f"group {part.group}" if part.group is not None else ""
    raise RequestRefused(
        "KVD-FORCE-PART",
        f"{engine.facts.engine_id} has no {what}: it has {len(found)} layers in {len(set(found.values()))} groups",
        hint="`kvctl export-geometry` lists them",
    )


def _layers(documents: Iterable[bytes]) -> dict[str, int]:
    """The group of each layer, by the geometries of workers, which were found good."""
    reader, found = AlikeReader(), dict[str, int]()
    for document in documents:
        geometry, _ = reader.read_document(document)
        found |= {layer.name: group.index for group in geometry.groups for layer in group.layers}
    return found


def _forced(daemon: Daemon, history: OrderHistory) -> ForcedMisses:
    order = history.order
    target = order.plan.target
    if order.open and isinstance(target, NextLoads) and time.time() > order.asked + target.seconds:
        order = msgspec.structs.replace(order, open=False)  # an idle engine does not look at its clock
    engine = daemon.registry.engines.get(order.engine_id)
    gone = ""
    if engine is None or engine.state == "gone":
        if not daemon.registry.settling:
            gone = engine.reason if engine is not None else "it is not registered here any more"
    elif engine.scheduler is not None and engine.scheduler.incarnation != order.incarnation:
        gone = "it was started again"
    return ForcedMisses(
        order=order, misses=tuple(history.misses.values()), revision=history.revision, gone=gone
    )


def _rank(miss: Miss) -> tuple[bool, int]:
    return miss.state in MISS_ENDS, len(miss.steps)
