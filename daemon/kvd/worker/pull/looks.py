"""When the thread of a lane looks at its loads again."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.later import LATER_SECONDS
from kvd.worker.load import Load

POLL_FAST, POLL_SLOW, FAST_FOR = 50e-6, 1e-3, 0.02
"""Seconds between polls: quick while a load is young, slower after; spinning would starve the transport."""
EARLY, POLL_DUE, DUE_FOR, LONGEST = 100e-6, 10e-6, 200e-6, 5e-3
"""Of a load that is due: seconds before that when looks begin, as a processor that slept for long wakes late; between
looks, until so long after it was due; and the longest wait for that. Before, a look only takes Python's lock from
others."""


def next_look(active: Sequence[Load], now: float, *, probing: bool, probe_posted: float) -> float:
    """Seconds to the next look at loads that are posted, or at a probe.

    Nobody waits for a load that its own step uses before that step is over; by then its worker looks itself.
    """
    awaited = [load for load in active if not load.order.in_step or now - load.times.posted > LATER_SECONDS]
    if not awaited and not probing:
        return LATER_SECONDS
    soonest = min((load.pieces.due for load in awaited), default=0.0)
    if soonest and not probing and now < soonest + DUE_FOR:
        return max(POLL_DUE, min(soonest - EARLY - now, LONGEST))
    youngest = max([load.times.posted for load in awaited] + [probe_posted])
    return POLL_FAST if now - youngest < FAST_FOR else POLL_SLOW
