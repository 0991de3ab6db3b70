"""Draining: an engine is to hand over what it holds and take nothing new, so that it can be stopped.

For ``grace_seconds`` nothing changes but what routers are shown: requests are on their way still. Then no lease is
opened for a prompt that comes, no load begins for one, and who comes late for a lease is not let in. What is claimed
goes on. An engine drains in one life: the next one of its name does not.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.wire.identity import Role
from kvd.wire.limits import MOST_ROWS, Count, Id, Seconds, Text
from kvd.wire.reply import Reply, Request


class DrainEngines(Request, tag="drain_engines", frozen=True, kw_only=True):
    """Drain an engine of the asked kvd, or all of them, also those that come later. Answered by `EnginesDraining`.

    ``look``: only say how far they are. ``undo``: they are to take requests again.
    """

    engine_id: Id = ""
    action: Literal["begin", "undo", "look"] = "look"
    grace_seconds: Seconds = 5.0


class DrainRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far an engine is.

    ``age``: seconds since it was told; ``grace``: those that are left until it takes nothing new. It gave ``leases``,
    of which ``claimed`` have readers, and reads under ``reads`` of others. What its scheduler counts is None where that
    does not say: ``prefills`` that are computed for a decoder, ``pushes`` and ``loads`` under way. ``note`` says why.
    """

    engine_id: Id
    role: Role
    draining: bool
    age: Seconds = 0.0
    grace: Seconds = 0.0
    leases: Count = 0
    claimed: Count = 0
    reads: Count = 0
    prefills: Count | None = None
    pushes: Count | None = None
    loads: Count | None = None
    note: Text = ""

    @property
    def held(self) -> int:
        """Of all that together; 0 where the engine can be stopped."""
        counted = (self.prefills, self.pushes, self.loads)
        return self.leases + self.reads + sum(count or 0 for count in counted)


class EnginesDraining(Reply, tag="engines_draining", frozen=True, kw_only=True):
    """The engines that were asked about. ``host``: further engines that come to this kvd will drain too."""

    rows: Annotated[tuple[DrainRow, ...], Meta(max_length=MOST_ROWS)]
    host: bool = False


class SetDraining(Request, tag="set_draining", frozen=True, kw_only=True):
    """kvd to an engine's scheduler: take nothing new in ``seconds``; None: take requests as ever.

    Said again whenever somebody asks how far it is. Answered by `EngineHolds`.
    """

    seconds: Seconds | None = None


class EngineHolds(Reply, tag="engine_holds", frozen=True, kw_only=True):
    """What a scheduler has under way that kvd does not see: as in `DrainRow`."""

    prefills: Count
    pushes: Count
    loads: Count
