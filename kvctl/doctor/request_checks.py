"""How requests were served of late: whether prefill and decode are as separate as they were meant to be."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.doctor.checks import checked
from kvctl.doctor.losses import ServedEngine
from kvctl.doctor.reasons import not_handed_over
from kvctl.views.doctor import Check
from kvd.wire import query
from kvd.wire.outcomes import GetOutcomes, Outcomes

LATELY_SECONDS = 60.0
IDLE = f"no request came to this host's engines in the last {LATELY_SECONDS:g} s, so there is nothing to judge by"

_transfers = partial(checked, "transfers")


def request_checks(settings: Settings) -> Iterator[Check]:
    """The checks; asks kvd, which asks the kvds that it is linked to."""
    rows = daemon.ask(settings, GetOutcomes(seconds=LATELY_SECONDS, peers=True), Outcomes).rows
    engines = daemon.ask(settings, query.ListEngines(), query.EngineList).rows
    weights = {row.engine.engine_id: row.engine.facts.get("weights") for row in engines}
    findings = not_handed_over(rows, weights)
    for finding in findings:
        yield _transfers(
            "failed" if finding.failed else "warning", "NOT_DISAGGREGATED", finding.found, finding.hint,
            reason=finding.reason,
        )  # fmt: skip
    if not findings:
        here = [ServedEngine(row) for row in rows if not row.endpoint.host]
        if all(engine.idle for engine in here):
            yield _transfers("skipped", "DISAGGREGATED", IDLE)
            return
        loaded = sum(e.requests("loaded", "cached") for e in here)
        handed = sum(e.requests("offered", "pushed") for e in here)
        found = (
            f"in the last {LATELY_SECONDS:g} s {handed} prefills were kept or pushed here and {loaded} loaded"
        )
        yield _transfers("ok", "DISAGGREGATED", found)
