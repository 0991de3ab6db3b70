"""The TransferGroups document: what `kvctl transfers --by` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import rate, size, span
from kvctl.cli.units import Bytes, BytesPerSecond, Count, Seconds
from kvctl.ledger.statistics import moving, quantile, took
from kvctl.views.registry import View, named
from kvctl.views.screen import Column, ScreenPart, number, table
from kvd.wire.transfer import LedgerRow, TransferList, TransferRecord

GROUPINGS: dict[str, Callable[[TransferRecord], str]] = {
    "peer": lambda r: r.remote_engine,
    "pair": lambda r: f"{r.remote_engine} to {r.local_engine}",
    "rank": lambda r: f"{r.local_engine}/{r.local_rank}",
    "backend": lambda r: r.backend,
    "mode": lambda r: r.mode,
    "state": lambda r: r.state,
    "code": lambda r: r.code or r.state,
    "cause": lambda r: r.cause or "done",
}
"""What transfers can be counted by."""


class TransferGroup(Struct, frozen=True, kw_only=True):
    """Transfers that have one thing in common."""

    key: Annotated[str, Meta(description="what they have in common")]
    transfers: Count
    misses: Count
    bytes: Bytes
    seconds_p50: Seconds
    seconds_p99: Seconds
    bytes_per_second: Annotated[
        BytesPerSecond | None, Meta(description="of all bytes pulled, over the stages post and wire together")
    ]


class TransferGroups(Struct, frozen=True, kw_only=True):
    """Transfers counted by what they have in common, most first."""

    by: str
    total: Annotated[int, Meta(ge=0, description="transfers in the ledger, matching or not")]
    counted: Annotated[int, Meta(ge=0, description="those looked at")]
    more: Annotated[bool, Meta(description="older ones match as well and were not looked at")]
    groups: tuple[TransferGroup, ...]


def grouped(answer: TransferList, by: str) -> TransferGroups:
    """The rows counted by one of `GROUPINGS`."""
    groups: dict[str, list[LedgerRow]] = {}
    for row in answer.rows:
        groups.setdefault(GROUPINGS[by](row.record), []).append(row)
    most_first = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return TransferGroups(
        by=by,
        total=answer.total,
        counted=len(answer.rows),
        more=answer.more,
        groups=tuple(_group(key, rows) for key, rows in most_first),
    )


def _group(key: str, rows: list[LedgerRow]) -> TransferGroup:
    records = [row.record for row in rows]
    times = [took(r) for r in records]
    pulled = [r for r in records if moving(r) > 0]
    seconds = sum(map(moving, pulled))
    return TransferGroup(
        key=key,
        transfers=len(records),
        misses=sum(r.state == "miss" for r in records),
        bytes=sum(r.bytes for r in records),
        seconds_p50=quantile(times, 0.5),
        seconds_p99=quantile(times, 0.99),
        bytes_per_second=sum(r.bytes for r in pulled) / seconds if seconds else None,
    )


def transfer_groups_screen(body: TransferGroups, wide: bool) -> ScreenPart:  # noqa: ARG001 (as all screens)
    """One group a line, most transfers first; a line below says when there were more than were looked at."""
    counted = table(
        body.groups,
        Column(body.by.upper(), lambda group: group.key),
        number("TRANSFERS", lambda group: group.transfers),
        number("MISSES", lambda group: group.misses),
        number("BYTES", lambda group: size(group.bytes)),
        number("P50", lambda group: span(group.seconds_p50)),
        number("P99", lambda group: span(group.seconds_p99)),
        number("RATE", lambda group: rate(group.bytes_per_second)),
    )
    if not body.more:
        return counted
    return [counted, "", f"the newest {body.counted} of {body.total}; --last looks at more"]


_NAMES = named("groups", lambda group: group.key)
VIEWS = (View(TransferGroups, transfer_groups_screen, "groups", TransferGroup, _NAMES),)
