"""What became of operators' orders: the newest ones with their misses, in memory, for whoever follows them."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kvd.wire.order import MISS_ENDS, Miss, OrderState

ORDERS_KEPT = 64
"""Of one user's engines: nobody pushes out the orders to another user's."""
USERS_KEPT = 64
"""Most users of whose engines orders are kept; the one that was given orders longest ago goes first."""
MISSES_KEPT = 2048
"""Of one order. What has ended goes first."""
LONGEST_CAUSE = 500
"""Characters of a miss's cause that are kept, and that go into an event."""
MOST_STEPS = 16
"""Steps of a miss that are kept, of which there are five."""


@dataclass(slots=True)
class OrderHistory:
    """One order: as it was reported last, its misses by request, and who waits for a change.

    ``uid`` is the user of the engine that it was given to.
    """

    order: OrderState
    uid: int = -1
    misses: dict[str, Miss] = field(default_factory=dict)
    revision: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MissHistory:
    """The newest orders by id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, OrderHistory] = OrderedDict()
        self._of: OrderedDict[int, OrderedDict[str, None]] = OrderedDict()

    def get(self, order_id: str) -> OrderHistory | None:
        """An order by id, the newest where none is given; None where it is not known."""
        if not order_id:
            return next(self.newest(), None)
        return self._kept.get(order_id)

    def newest(self) -> Iterator[OrderHistory]:
        """All orders, the newest first."""
        return reversed(self._kept.values())

    def learn(self, order: OrderState, uid: int, miss: Miss | None = None) -> Miss | None:
        """Take a report on an engine of user ``uid``. Returns the miss as it was before.

        A report that is older than that changes nothing. One of an order to another engine has been refused before.
        """
        order_id = order.asker.order_id
        history = self._kept.get(order_id)
        if history is None:
            history = self._keep(OrderHistory(order, uid))
        else:
            history.order = _newer(history.order, order)
        before = None
        if miss is not None:
            before = history.misses.get(miss.request_id)
            if before is None or len(miss.steps) > len(before.steps) or miss.state in MISS_ENDS:
                history.misses[miss.request_id] = _bounded(miss)
                _trim(history.misses)
        history.revision += 1
        history.changed.set()
        history.changed = asyncio.Event()
        return before

    def _keep(self, history: OrderHistory) -> OrderHistory:
        order_id, plan = history.order.asker.order_id, history.order.plan
        if len(plan.requests) > MISSES_KEPT:
            plan = msgspec.structs.replace(plan, requests=plan.requests[:MISSES_KEPT])
            history.order = msgspec.structs.replace(history.order, plan=plan)
        self._kept[order_id] = history
        of = self._of.setdefault(history.uid, OrderedDict())
        of[order_id] = None
        self._of.move_to_end(history.uid)
        if len(of) > ORDERS_KEPT:
            del self._kept[of.popitem(last=False)[0]]
        if len(self._of) > USERS_KEPT:
            for gone in self._of.popitem(last=False)[1]:
                del self._kept[gone]
        return history


def _bounded(miss: Miss) -> Miss:
    if len(miss.steps) <= MOST_STEPS and len(miss.cause) <= LONGEST_CAUSE:
        return miss
    steps = dict(itertools.islice(miss.steps.items(), MOST_STEPS))
    return msgspec.structs.replace(miss, steps=steps, cause=miss.cause[:LONGEST_CAUSE])


def _newer(one: OrderState, other: OrderState) -> OrderState:
    """Reports may come in any order, and an order only ever goes on."""
    return msgspec.structs.replace(
        one,
        open=one.open and other.open,
        looked=max(one.looked, other.looked),
        taken=max(one.taken, other.taken),
    )


def _trim(misses: dict[str, Miss]) -> None:
    if len(misses) > MISSES_KEPT:
        ended = (name for name, miss in misses.items() if miss.state in MISS_ENDS)
        del misses[next(ended, next(iter(misses)))]
