"""The figures of a fleet as text, for docs/fleet.md."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.fleet.asking import Asked
from benchmarks.fleet.costs import Costs
from benchmarks.fleet.model import Predicted
from benchmarks.fleet.real import Figures


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured, and what the model says of other sizes."""

    real: tuple[Figures, ...] = ()
    costs: Costs | None = None
    model: tuple[Predicted, ...] = ()
    asked: Asked | None = None


def text(report: Report) -> str:
    """Tables as in the docs."""
    parts = []
    if report.real or report.model:
        parts.append(_lines(_FLEET, [*map(_real, report.real), *map(_model, report.model)]))
    if report.real:
        parts.append(_lines(_DEATH, [*map(_death, report.real), *map(_model_death, report.model)]))
    if report.real:
        parts.append(_lines(_CHURN, [*map(_churn, report.real)]))
    if report.costs is not None:
        parts.append(_lines(("cost of", "is"), _costs(report.costs)))
    if report.asked is not None:
        parts.append(_lines(_ASKED, _answers(report.asked)))
    return "\n".join(parts)


_FLEET = (
    "hosts, peers of each",
    "processor of a host",
    "messages a second",
    "KB a second",
    "messages of all",
    "warm after",
    "memory",
)
_DEATH = ("hosts", "die", "known: median", "last", "not known", "wrongly down", "a death costs a host")
_CHURN = ("hosts, found by", "one engine leaves", "it is back", "told each way", "both cost all hosts")
_ASKED = ("kvctl ... --fleet", "seconds", "fastest", "of processor", "unanswered")


def _real(run: Figures) -> tuple[str, ...]:
    return (
        f"{run.hosts} real, {run.hosts - 1}",
        f"{100 * run.processor:.1f} %",
        f"{run.messages:.0f}",
        f"{run.bytes / 1e3:.0f}",
        f"{run.hosts * run.messages:,.0f}",
        f"{run.warm:.1f} s",
        f"{run.rss / 1e6:.0f} MB",
    )


def _model(one: Predicted) -> tuple[str, ...]:
    missing = f", {one.links_missing} not linked" if one.links_missing else ""
    return (
        f"{one.hosts:,} model, {one.peers:,}{missing}",
        f"{100 * one.processor:.1f} %",
        f"{one.messages:.0f}",
        f"{one.bytes / 1e3:,.0f}",
        f"{one.fleet_messages:,.0f}",
        "never" if one.processor >= 1 else f"{one.warm:.1f} s",
        f"{one.memory / 1e6:.0f} MB",
    )


def _death(run: Figures) -> tuple[str, ...]:
    died = run.death
    return (
        f"{run.hosts} real",
        f"{died.killed} killed, {died.stopped} silent",
        f"{died.known_median:.2f} s",
        f"{died.known_most:.2f} s",
        f"{died.unknown} of {died.pairs}",
        str(died.wrongly_down),
        f"{1e3 * died.processor:.1f} ms",
    )


def _churn(run: Figures) -> tuple[str, ...]:
    churn = run.churn
    return (
        f"{run.hosts} real, {'etcd' if run.etcd else 'their settings'}",
        f"{churn.left:.2f} s",
        f"{churn.joined:.2f} s",
        str(churn.partners),
        f"{churn.processor:.2f} s of processor",
    )


def _model_death(one: Predicted) -> tuple[str, ...]:
    return (
        f"{one.hosts:,} model, {one.peers:,} peers",
        "a tenth",
        f"{one.known_median:.2f} s",
        f"{one.known_most:.2f} s",
        str(one.unknown),
        str(one.wrongly_down),
        f"{1e3 * one.death_processor:.1f} ms for all",
    )


def _costs(costs: Costs) -> list[tuple[str, ...]]:
    return [
        ("a second with no peers", f"{1e3 * costs.idle:.1f} ms of processor"),
        ("a ping with its answer, both ends", f"{1e3 * costs.ping:.2f} ms, {costs.ping_bytes:.0f} bytes"),
        (
            "a look at engines, both ends",
            f"{1e3 * costs.look:.2f} ms, {costs.look_bytes:.0f} bytes, {costs.name_bytes:.1f} for each peer engine",
        ),
        ("an engine that is introduced", f"{1e3 * costs.introduction:.2f} ms"),
        ("a peer that is down", f"{1e3 * costs.down:.2f} ms"),
        ("memory", f"{costs.memory / 1e6:.1f} MB, {costs.peer_memory / 1e3:.0f} KB for each peer"),
    ]


def _answers(asked: Asked) -> list[tuple[str, ...]]:
    return [
        (
            one.command,
            f"{one.seconds:.2f}",
            f"{one.fastest:.2f}",
            f"{one.processor:.2f}",
            f"{one.unanswered} of {asked.hosts}",
        )
        for one in asked.commands
    ]


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *lines = (f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return "".join([first, "|---" * len(head) + "|\n", *lines])
