"""How requests were served of late: whether prefill and decode are as separate as they were meant to be."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.doctor.checks import checked
from kvctl.doctor.losses import ServedEngine
from kvctl.doctor.reasons import not_handed_over
from kvctl.views.doctor import Check
from kvd.wire.outcomes import GetOutcomes, OutcomeRow
from kvd.wire.query import EngineRow

LATELY_SECONDS = 60.0
IDLE = f"no request came to this host's engines in the last {LATELY_SECONDS:g} s, so there is nothing to judge by"


def request_checks(settings: Settings) -> list[Check]:
    """The checks; asks kvd, which asks the kvds that it is linked to."""
    rows = daemon.outcomes(settings, GetOutcomes(seconds=LATELY_SECONDS, peers=True))
    return checks_of(rows, daemon.engines(settings))


def checks_of(rows: Sequence[OutcomeRow], engines: Sequence[EngineRow]) -> list[Check]:
    """The checks of how requests were served; ``rows`` of other hosts have their endpoint."""
    weights = {row.engine.engine_id: row.engine.facts.get("weights") for row in engines}
    findings = not_handed_over(rows, weights)
    if findings:
        return findings
    here = [ServedEngine(row) for row in rows if not row.endpoint.host]
    if all(engine.idle for engine in here):
        unseen = sum(row.hidden for row in engines if row.local)
        others = f"; {unseen} engines of other users are not looked at" if unseen else ""
        return [checked("transfers", "skipped", "DISAGGREGATED", IDLE + others)]
    loaded = sum(e.requests("loaded", "cached") for e in here)
    handed = sum(e.requests("offered", "pushed") for e in here)
    found = f"in the last {LATELY_SECONDS:g} s {handed} prefills were kept or pushed here and {loaded} loaded"
    return [checked("transfers", "ok", "DISAGGREGATED", found)]
