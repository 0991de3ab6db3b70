"""The FleetSlow document: what `kvctl slow --fleet` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvctl.cli.numbers import counted
from kvctl.cli.units import Count, filled
from kvctl.ledger.slow_findings import SlowFinding
from kvctl.ledger.slow_pairs import SlowPair
from kvctl.views.fleet.differing import differing
from kvctl.views.fleet.unanswered import FleetOf, unanswered_screen
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart
from kvctl.views.slow import Slow, findings_screen, pair_columns


class FleetSlowPair(SlowPair, frozen=True, kw_only=True):
    """A pair of engines, as the ledger of the decoder's host has it."""

    host: Annotated[str, Meta(description="host:port of the kvd whose ledger has it")]


class FleetSlowFinding(SlowFinding, frozen=True, kw_only=True):
    """Something worth doing."""

    host: Annotated[str, Meta(description="host:port of the kvd whose ledger shows it")]


class FleetSlow(FleetOf, frozen=True, kw_only=True):
    """What transfers of all known hosts spent their time on, most time first."""

    total: Annotated[Count, Meta(description="transfers in the ledgers, matching or not")]
    looked_at: Count
    more: Annotated[bool, Meta(description="older ones match as well and were not looked at")]
    pairs: tuple[FleetSlowPair, ...]
    findings: tuple[FleetSlowFinding, ...]


def fleet_slow(answers: Mapping[str, Slow], asked: Mapping[str, Any]) -> FleetSlow:
    """The documents of all hosts as one; ``asked`` are the fields of `FleetOf`."""
    pairs = [filled(FleetSlowPair, pair, host=host) for host, one in answers.items() for pair in one.pairs]
    findings = [
        filled(FleetSlowFinding, finding, host=host)
        for host, one in answers.items()
        for finding in one.findings
    ]
    return FleetSlow(
        total=sum(one.total for one in answers.values()),
        looked_at=sum(one.looked_at for one in answers.values()),
        more=any(one.more for one in answers.values()),
        pairs=tuple(sorted(pairs, key=lambda pair: -pair.seconds_p50 * pair.transfers)),
        findings=tuple(sorted(findings, key=lambda finding: finding.severity != "warning")),
        **asked,
    )


def fleet_slow_screen(body: FleetSlow, wide: bool) -> ScreenPart:
    """One pair a line, then the findings."""
    if not body.looked_at:
        none = f"none of {body.total} transfers matches" if body.total else "the ledgers hold no transfer yet"
        return [none, *unanswered_screen(body.unanswered)]
    older = ", older ones match as well: --last looks at more of each host" if body.more else ""
    remote, *others = pair_columns(wide)
    return [
        f"{counted(body.looked_at, 'transfer')}{older}",
        "",
        differing(body.pairs, remote, Column("HOST", lambda one: one.host), *others, whole=wide),
        *findings_screen(body.findings),
        *unanswered_screen(body.unanswered),
    ]


VIEWS = (View(FleetSlow, fleet_slow_screen, "pairs", FleetSlowPair),)
