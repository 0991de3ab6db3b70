"""What became of operators' orders: the newest ones with their misses, in memory, for whoever follows them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from kvd.wire.order import MISS_ENDS, Miss, OrderState

ORDERS_KEPT = 64
MISSES_KEPT = 2048
"""Of one order. What has ended goes first."""


@dataclass(slots=True)
class OrderHistory:
    """One order: as it was reported last, its misses by request, and who waits for a change."""

    order: OrderState
    misses: dict[str, Miss] = field(default_factory=dict)
    revision: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MissHistory:
    """The newest orders by id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, OrderHistory] = OrderedDict()

    def get(self, order_id: str) -> OrderHistory | None:
        """An order by id, the newest where none is given; None where it is not known."""
        if not order_id:
            return next(reversed(self._kept.values()), None)
        return self._kept.get(order_id)

    def learn(self, order: OrderState, miss: Miss | None = None) -> Miss | None:
        """Take a report. Returns the miss as it was before; a report that is older than that changes nothing."""
        order_id = order.asker.order_id
        history = self._kept.get(order_id)
        if history is None:
            history = self._kept[order_id] = OrderHistory(order)
            while len(self._kept) > ORDERS_KEPT:
                self._kept.popitem(last=False)
        else:
            history.order = _newer(history.order, order)
        before = None
        if miss is not None:
            before = history.misses.get(miss.request_id)
            if before is None or len(miss.steps) > len(before.steps) or miss.state in MISS_ENDS:
                history.misses[miss.request_id] = miss
                _trim(history.misses)
        history.revision += 1
        history.changed.set()
        history.changed = asyncio.Event()
        return before


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
