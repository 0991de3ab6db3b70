"""Operators' orders to a running engine: loads that are to miss, and what became of each of them.

An order goes from kvctl to the kvd of the decoding engine, and from there to the engine's scheduler, which plans it,
carries it out and reports every step. Reports hold all that is known so far, so they may be lost or come twice.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvd.geometry.rank import Rank
from kvd.wire.limits import Count, Id, Number, Seconds, Spans, Text, Whole
from kvd.wire.reply import Reply, Request

When = Literal["now", "before", "flight", "layers"]
"""When a load is made to miss: as soon as can be, before anything of it is read, when it is under way, when a part of
it has arrived."""
MissState = Literal["ordered", "forced", "reported", "rescheduled", "recovered", "late", "over"]
"""How far a forced miss is. The last three are ends: computed to its first token; the load was complete before the
order reached it; the request ended without a token."""
MISS_ENDS = frozenset({"recovered", "late", "over"})
MOST_MISSES = 16_384
"""Requests that one order is about: vLLM lets far less wait at an engine."""
STEPS = ("forced", "quiesced", "reported", "rescheduled", "first_token")
"""What happens to a forced miss, in this order."""


class OneRequest(msgspec.Struct, tag="one", frozen=True):
    """A request: its id, with or without what vLLM adds to it, or its transfer's or prefill's id."""

    request_id: Id


class AllWaiting(msgspec.Struct, tag="waiting", frozen=True):
    """All requests of the engine that wait for their KV at the moment."""


class NextLoads(msgspec.Struct, tag="next", frozen=True, kw_only=True):
    """Of the next ``count`` loads (0: all) each one with probability ``ratio``, for ``seconds`` at most.

    The same ``seed`` takes the same ones again.
    """

    count: Whole = 0
    ratio: Number = 1.0
    seed: Whole = 0
    seconds: Seconds = 600.0


Target: TypeAlias = OneRequest | AllWaiting | NextLoads


class LoadPart(msgspec.Struct, frozen=True, kw_only=True):
    """What of a load is to fail: its part on one worker, or a group's or layer's bytes, the only ones not to arrive."""

    group: Whole | None = None
    layer: Id = ""
    rank: Rank | None = None


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Who gave an order, as kvd saw it, and how kvd calls the order."""

    order_id: Id = ""
    uid: Whole = -1
    pid: Whole = 0

    def __str__(self) -> str:
        """As it stands in causes."""
        return f"uid {self.uid}, pid {self.pid}, order {self.order_id}"


class ForceMiss(Request, tag="force_miss", frozen=True, kw_only=True):
    """Make loads of an engine miss; unless it is to ``carry_out``, only say what that would do.

    Answered by `ForcePlan`, or refused with nothing changed. ``asker`` is filled in by kvd.
    """

    engine_id: Id
    target: Target
    when: When = "now"
    part: LoadPart = LoadPart()
    carry_out: bool = False
    asker: Asker = Asker()


class PlannedMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose load would miss.

    ``loading``: its load is under way. Of its prompt's ``tokens``, ``keeps`` would stay computed and ``recomputes`` are
    computed again; pieces of the load that came, or a hit in the prefix cache, may make that less.
    """

    request_id: Id
    prefiller: Id
    loading: bool
    tokens: Count
    keeps: Count
    recomputes: Count


class ForcePlan(Reply, tag="force_plan", frozen=True, kw_only=True):
    """What an order does, or would do.

    ``channel`` is how vLLM is told: by ``blocks``, where it keeps what was computed before the load and those of its
    pieces that came; by ``request``, where it drops all.
    """

    order_id: Id
    engine_id: Id
    target: Target
    when: When
    policy: Id
    mode: Id
    groups: Count
    channel: Literal["blocks", "request"]
    carried_out: bool
    requests: Annotated[tuple[PlannedMiss, ...], Meta(max_length=MOST_MISSES)] = ()


class ClearForced(Request, tag="clear_forced", frozen=True, kw_only=True):
    """End an order, or all of an engine, for loads that it has not reached yet. Answered by `ForcedCleared`."""

    engine_id: Id
    order_id: Id = ""
    asker: Asker = Asker()


class ForcedCleared(Reply, tag="forced_cleared", frozen=True):
    """The orders that were open and are no more."""

    order_ids: Annotated[tuple[Id, ...], Meta(max_length=MOST_MISSES)]


class OrderState(msgspec.Struct, frozen=True, kw_only=True):
    """An order as the scheduler that carries it out sees it.

    ``asked`` is Unix time. ``open``: further loads may be taken. Of ``looked`` loads that it had a look at, ``taken``
    were to miss.
    """

    asker: Asker
    engine_id: Id
    incarnation: Id
    asked: Seconds
    open: bool
    looked: Count
    taken: Count
    plan: ForcePlan


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """One forced miss so far.

    ``steps`` are seconds after the order was given, by the names in `STEPS`. ``kept`` and ``recomputed`` are tokens of
    the prompt, known once it is rescheduled.
    """

    request_id: Id
    prefiller: Id
    state: MissState
    tokens: Count
    cause: Text = ""
    steps: Spans = {}
    kept: Count | None = None
    recomputed: Count | None = None


class ReportForced(Request, tag="report_forced", frozen=True, kw_only=True):
    """The scheduler to kvd: an order as it is now, or one of its misses. Answered by `Ok`."""

    order: OrderState
    miss: Miss | None = None


class GetForced(Request, tag="get_forced", frozen=True, kw_only=True):
    """What became of an order (empty: of the newest).

    Answered by `ForcedMisses`: at once where it differs from ``revision``, else when it changes or after ``seconds``.
    """

    order_id: Id = ""
    revision: Whole = -1
    seconds: Seconds = 0.0


class ForcedMisses(Reply, tag="forced", frozen=True, kw_only=True):
    """An order with its misses. ``gone`` says why nobody carries it out any more."""

    order: OrderState
    misses: Annotated[tuple[Miss, ...], Meta(max_length=MOST_MISSES)]
    revision: Whole
    gone: Text = ""


class EndLease(Request, tag="end_lease", frozen=True, kw_only=True):
    """End a lease of an engine here before its time; unless it is to ``carry_out``, only say what that would do.

    No reader is let in any more. What readers were promised is kept: they may be reading now, and their loads would
    get another request's bytes. Answered by `LeaseEnding`.
    """

    engine_id: Id
    request_id: Id
    carry_out: bool = False


class LeaseEnding(Reply, tag="lease_ending", frozen=True, kw_only=True):
    """A lease that ends before its time, or would: when its last reader has gone, after ``seconds`` at the latest."""

    engine_id: Id
    request_id: Id
    blocks: Count
    readers: Count
    seconds: Seconds
    carried_out: bool
