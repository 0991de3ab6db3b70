"""What became of operators' orders: the newest ones with their misses, in memory, for whoever follows them."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kvd.service.fairness.tally import Tally
from kvd.wire.order import MISS_ENDS, Miss, OrderState, PlannedMiss

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
LONGEST_STEP = 32
"""Characters of a step's name that are kept."""
MOST_BYTES_OF_USER = 16 << 20
"""Of the orders to one user's engines: 64 orders of some hundred requests each take half of it. Beyond it the order
that was reported of longest ago is forgotten, and then the oldest misses of the only one."""
MOST_BYTES = 32 << 20
"""Of all users' together. Beyond it the user that has most loses one."""
REQUEST_BYTES, MISS_BYTES, STEP_BYTES = 150, 500, 120
"""What a planned miss, a miss and a step of it take besides their texts."""


@dataclass(slots=True)
class OrderHistory:
    """One order: as it was reported last, its misses by request, and who waits for a change.

    ``uid`` is the user of the engine that it was given to. ``size`` is about what all of it takes, in bytes.
    """

    order: OrderState
    uid: int = -1
    misses: dict[str, Miss] = field(default_factory=dict)
    revision: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = 0


class MissHistory:
    """The newest orders by id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, OrderHistory] = OrderedDict()
        self._of: OrderedDict[int, OrderedDict[str, None]] = OrderedDict()
        """Orders by user; what was reported of last is at the end."""
        self._bytes: Tally[int] = Tally()

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
            self._of[history.uid].move_to_end(order_id)
        before = None
        if miss is not None:
            before = history.misses.get(miss.request_id)
            if before is None or len(miss.steps) > len(before.steps) or miss.state in MISS_ENDS:
                miss = _bounded(miss)
                history.misses[miss.request_id] = miss
                self._grow(history, _size_of(miss) - (_size_of(before) if before is not None else 0))
                if len(history.misses) > MISSES_KEPT:
                    self._trim(history)
        self._make_room(history.uid)
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
        self._grow(history, MISS_BYTES + sum(map(_size_of_planned, plan.requests)))
        if len(of) > ORDERS_KEPT:
            self._drop(next(iter(of)))
        if len(self._of) > USERS_KEPT:
            for gone in tuple(next(iter(self._of.values()))):
                self._drop(gone)
        return history

    def _drop(self, order_id: str) -> None:
        history = self._kept.pop(order_id)
        self._grow(history, -history.size)
        of = self._of[history.uid]
        del of[order_id]
        if not of:
            del self._of[history.uid]

    def _grow(self, history: OrderHistory, more: int) -> None:
        history.size += more
        self._bytes.add(history.uid, more)

    def _make_room(self, uid: int) -> None:
        """Forget until that user's orders, and those of all, take no more than they may."""
        while self._bytes[uid] > MOST_BYTES_OF_USER:
            last = next(iter(self._of[uid]))
            if len(self._of[uid]) > 1:
                self._drop(last)
            elif self._kept[last].misses:
                self._trim(self._kept[last])
            else:
                break  # a plan alone is no more than a message may have
        while self._bytes.total > MOST_BYTES:
            most = max(self._bytes.of, key=self._bytes.of.__getitem__)
            self._drop(next(iter(self._of[most])))

    def _trim(self, history: OrderHistory) -> None:
        ended = (name for name, miss in history.misses.items() if miss.state in MISS_ENDS)
        gone = history.misses.pop(next(ended, next(iter(history.misses))))
        self._grow(history, -_size_of(gone))


def _bounded(miss: Miss) -> Miss:
    steps = {name[:LONGEST_STEP]: at for name, at in itertools.islice(miss.steps.items(), MOST_STEPS)}
    return msgspec.structs.replace(miss, steps=steps, cause=miss.cause[:LONGEST_CAUSE])


def _newer(one: OrderState, other: OrderState) -> OrderState:
    """Reports may come in any order, and an order only ever goes on."""
    return msgspec.structs.replace(
        one,
        open=one.open and other.open,
        looked=max(one.looked, other.looked),
        taken=max(one.taken, other.taken),
    )


def _size_of(miss: Miss) -> int:
    texts = sys.getsizeof(miss.request_id) + sys.getsizeof(miss.prefiller) + sys.getsizeof(miss.cause)
    return MISS_BYTES + texts + STEP_BYTES * len(miss.steps)


def _size_of_planned(miss: PlannedMiss) -> int:
    return REQUEST_BYTES + sys.getsizeof(miss.request_id) + sys.getsizeof(miss.prefiller)
