"""How requests were served: what an engine's scheduler counts, and what kvd knows of the last minutes.

Level-triggered, as registration is: a scheduler reports totals since its start, and what a kvd has acknowledged of
them. A kvd that was just started takes the difference between the two, so nothing is lost or counted twice.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from kvd.wire.identity import Endpoint, Role
from kvd.wire.limits import MOST_ROWS, Count, Id, Seconds, Text, Whole
from kvd.wire.reply import Reply, Request

Outcome = Literal[
    "offered", "pushed", "not_offered", "loaded", "cached", "unused", "refused", "missed", "plain"
]
"""What became of a request's prompt, where the engine was asked to prefill for another

- ``offered``: its blocks are kept, and the answer carries params
- ``pushed``: its blocks are sent to a decoder
- ``not_offered``: nothing is kept for a decoder, for the reason that ``code`` names

where it came with another's prefill

- ``loaded``: the KV was loaded
- ``cached``: all of it was here already
- ``unused``: vLLM took none of it and computed the prompt here, as for ``prompt_logprobs``
- ``refused``: its params, its prefiller or its lease could not be used, so it was computed here; ``code`` names why
- ``missed``: the load failed, so it was computed here; ``code`` names why

and where it asked for neither: ``plain``. ``code`` is `OTHER_PARAMS` where it had params all the same,
`ASKED_TO_PREFILL` where it asked a decoder to prefill for another.
"""
NotOffered = Literal[
    "NO_KVD",
    "WORKERS_MISSING",
    "NO_BLOCKS",
    "NOT_COPIED",
    "NOT_PUSHED",
    "PROMPT_LOGPROBS",
    "ID_TOO_LONG",
    "DRAINING",
]
"""The codes of ``not_offered``; those of ``refused`` and ``missed`` are `kvd.wire.miss.MissCode`."""
OTHER_PARAMS = "OTHER_PARAMS"
"""The code of a request whose kv_transfer_params asked for nothing here."""
ASKED_TO_PREFILL = "ASKED_TO_PREFILL"
"""The code of a request that asked a decoder to prefill for another."""
OTHER = "OTHER"
"""Stands for further codes of an outcome once there are too many."""

MOST_COUNTS = 256

OutcomeKey: TypeAlias = tuple[Outcome, str]
"""An outcome and its code."""


class OutcomeCount(msgspec.Struct, frozen=True, array_like=True):
    """Requests of one outcome and code. ``tokens`` of their prompts were moved, or computed where it was not done."""

    outcome: Outcome
    code: Annotated[str, msgspec.Meta(max_length=64)]
    requests: Count
    tokens: Count


Counts = Annotated[tuple[OutcomeCount, ...], msgspec.Meta(max_length=MOST_COUNTS)]


class ReportOutcomes(Request, tag="report_served", frozen=True, kw_only=True):
    """A scheduler's totals since its start, and those that a kvd has acknowledged. Answered by `Ok`."""

    engine_id: Id
    totals: Counts
    known: Counts = ()


class GetOutcomes(Request, tag="get_served", frozen=True, kw_only=True):
    """How requests were served in the last ``seconds``. Answered by `Outcomes`.

    With ``peers`` also at engines of those kvds that this one has a link to and that answer at once. ``after`` is the
    ``more`` of the answer before.
    """

    seconds: Seconds = 60.0
    peers: bool = False
    after: Text = ""


class OutcomeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``lately`` is of the last ``seconds``, ``totals`` since its kvd has known it.

    ``unclaimed`` leases were claimed by nobody. They are of those opened in a time as long that ended some seconds ago,
    so that there was time to claim them. ``leases_total`` and ``claimed_total`` count since kvd has known the engine.
    ``endpoint`` is that of its kvd, empty for the one that was asked.
    """

    engine_id: Id
    role: Role
    model: Text
    seconds: Seconds
    lately: Counts = ()
    totals: Counts = ()
    leases: Count = 0
    unclaimed: Whole = 0
    leases_total: Count = 0
    claimed_total: Count = 0
    endpoint: Endpoint = Endpoint()


class Outcomes(Reply, tag="served", frozen=True, kw_only=True):
    """The engines, those of other kvds last. ``more``: the asked kvd has further ones; ask again after it.

    Of ``hidden`` further engines, which are other users', the asker may see nothing.
    """

    rows: Annotated[tuple[OutcomeRow, ...], msgspec.Meta(max_length=MOST_ROWS)]
    more: Text = ""
    hidden: Count = 0
