"""The tables of the full screen: which rows, in which columns, and what a column is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.views.screen import Cell, Styled, state
from kvctl.views.top import EngineLoad, InFlight, MissLoad, PairLoad, Top
from kvctl.views.transfers.document import TransferDocument
from kvd.shown import escaped

WIDEST_IDS = (60, 48, 40, 32, 28, 24, 22, 20, 18, 16, 14, 12, 10)
"""Characters of an id in a table, as many as there is room for: what is cut there stands whole below the table."""


class Shown(NamedTuple):
    """A column: its header, an item's cell, and what items are sorted by. ``name``: its cells are ids."""

    header: str
    cell: Callable[[Any], Cell]
    order: Callable[[Any], Any]
    right: bool = False
    name: bool = False


class Table(NamedTuple):
    """One of the tables. ``key`` tells rows apart, ``about`` has the ids of a row whole.

    ``transfer`` names the transfer that a row stands for, empty where it is none.
    """

    name: str
    items: Callable[[Top], Sequence[Any]]
    key: Callable[[Any], str]
    about: Callable[[Any], str]
    columns: tuple[Shown, ...]
    transfer: Callable[[Any], str] = lambda _: ""


def _text(header: str, of: Callable[[Any], str]) -> Shown:
    return Shown(header, of, of, name=True)


def _state(header: str, of: Callable[[Any], str]) -> Shown:
    return Shown(header, lambda item: state(of(item)), of)


def _number(header: str, shown: Callable[[Any], str], of: Callable[[Any], float]) -> Shown:
    return Shown(header, shown, of, right=True)


def _count(header: str, of: Callable[[Any], int]) -> Shown:
    return _number(header, lambda item: str(of(item)), of)


def _bad(header: str, of: Callable[[Any], int]) -> Shown:
    def cell(item: Any) -> Cell:
        return Styled(str(of(item)), "red") if of(item) else "0"

    return Shown(header, cell, of, right=True)


def short(name: str, widest: int) -> str:
    """An id of at most so many characters: its begin and its end, which is where ids differ."""
    if len(name) <= widest:
        return name
    tail = min(8, widest // 2)
    return f"{name[: widest - tail - 1]}~{name[-tail:]}"


def fitting(table: Table, items: Sequence[Any], width: int) -> list[list[Cell]]:
    """The cells of all rows, with ids cut as far as it takes for all columns to stand in so many characters.

    Prose, the last column of some tables, may run over.
    """
    rows = [[column.cell(item) for column in table.columns] for item in items]
    for widest in WIDEST_IDS:
        cut = [_cut(table, row, widest) for row in rows]
        taken = sum(
            2 + max(len(column.header), *(len(escaped(_plain(row[at]))) for row in cut), 0)
            for at, column in enumerate(table.columns)
            if column.header != "CAUSE"
        )
        if taken <= width:
            break
    return cut


def _cut(table: Table, row: list[Cell], widest: int) -> list[Cell]:
    return [
        short(_plain(cell), widest) if column.name else cell
        for column, cell in zip(table.columns, row, strict=True)
    ]


def _plain(cell: Cell) -> str:
    return cell.text if isinstance(cell, Styled) else cell


def _engine(one: EngineLoad) -> str:
    engine = one.engine
    served = ", ".join(f"{count} {outcome}" for outcome, count in engine.served.items())
    told = (
        engine.engine_id,
        engine.model,
        engine.endpoint or "",
        engine.reason,
        served and f"{served} in a minute",
    )
    return "  ".join(filter(None, told))


def _pair(pair: PairLoad) -> str:
    return f"{pair.remote_engine} to {pair.local_engine}  {size(pair.bytes)}, {rate(pair.bytes_per_second)}"


def _flight(one: InFlight) -> str:
    return f"{one.request_id}  from {one.remote_engine}  to {one.local_engine or 'another host'}"


def _transfer(one: TransferDocument) -> str:
    cause = f"  {one.code}: {one.cause}" if one.cause else ""
    return f"{one.request_id}  from {one.remote_engine}  to {one.local_engine}/{one.local_rank}{cause}"


def _miss(miss: MissLoad) -> str:
    return "  ".join(filter(None, (miss.code, miss.cause, miss.request_id)))


TABLES = (
    Table(
        "Engines",
        lambda top: top.engines,
        lambda one: f"{one.engine.engine_id}@{one.engine.endpoint}",
        _engine,
        (
            _text("ENGINE", lambda one: one.engine.engine_id),
            _text("ROLE", lambda one: one.engine.role),
            _state("STATE", lambda one: one.engine.state),
            _number(
                "RANKS",
                lambda e: f"{len(e.engine.ranks)}/{e.engine.world_size}",
                lambda e: e.engine.world_size,
            ),
            _count("LEASES", lambda one: one.engine.leases),
            _number("IN", lambda one: rate(one.bytes_in_per_second), lambda one: one.bytes_in),
            _number("OUT", lambda one: rate(one.bytes_out_per_second), lambda one: one.bytes_out),
            _bad("MISSES", lambda one: one.misses),
        ),
    ),
    Table(
        "Pairs",
        lambda top: top.pairs,
        lambda pair: f"{pair.remote_engine}\n{pair.local_engine}",
        _pair,
        (
            _text("FROM", lambda pair: pair.remote_engine),
            _text("TO", lambda pair: pair.local_engine),
            _count("LOADS", lambda pair: pair.transfers),
            _bad("MISSES", lambda pair: pair.misses),
            _number("RATE", lambda pair: rate(pair.bytes_per_second), lambda pair: pair.bytes_per_second),
            _number("P50", lambda pair: span(pair.seconds_p50), lambda pair: pair.seconds_p50),
            _number("P99", lambda pair: span(pair.seconds_p99), lambda pair: pair.seconds_p99),
        ),
    ),
    Table(
        "In flight",
        lambda top: top.in_flight,
        lambda one: f"{one.remote_engine}\n{one.local_engine}\n{one.request_id}",
        _flight,
        (
            _number("SINCE", lambda one: span(one.seconds), lambda one: one.seconds),
            _number("LEFT", lambda one: span(one.left), lambda one: one.left),
            _text("FROM", lambda one: one.remote_engine),
            _text("TO", lambda one: one.local_engine or f"{one.readers} elsewhere"),
            _text("REQUEST", lambda one: one.request_id),
        ),
        lambda one: one.request_id,
    ),
    Table(
        "Transfers",
        lambda top: top.transfers,
        lambda one: str(one.seq),
        _transfer,
        (
            _number("STARTED", lambda one: clock(one.started), lambda one: one.started.timestamp()),
            _text("REQUEST", lambda one: one.request_id),
            _text("FROM", lambda one: one.remote_engine),
            _text("TO", lambda one: f"{one.local_engine}/{one.local_rank}"),
            _state("STATE", lambda one: one.state),
            _number("BYTES", lambda one: size(one.bytes), lambda one: one.bytes),
            _number("TIME", lambda one: span(one.seconds), lambda one: one.seconds),
        ),
        lambda one: str(one.seq),
    ),
    Table(
        "Misses",
        lambda top: top.miss_codes,
        lambda miss: miss.code,
        _miss,
        (
            Shown(
                "CODE", lambda miss: Styled(miss.code, "red" if miss.lately else ""), lambda miss: miss.code
            ),
            _count("MINUTE", lambda miss: miss.lately),
            _count("TOTAL", lambda miss: miss.total),
            _text("REQUEST", lambda miss: miss.request_id),
            Shown("CAUSE", lambda miss: miss.cause or "-", lambda miss: miss.cause),
        ),
        lambda miss: miss.request_id,
    ),
)
"""In the order in which they are shown."""


def chosen(table: Table, top: Top, wanted: str, column: int | None, *, backwards: bool) -> list[Any]:
    """The items that have the text ``wanted`` in what is shown of them, by ``column``, or as they come."""
    items: Iterable[Any] = table.items(top)
    if wanted:
        items = (item for item in items if wanted.lower() in _words(table, item))
    if column is None:
        return [*items]
    return sorted(items, key=table.columns[column].order, reverse=backwards)


def _words(table: Table, item: Any) -> str:
    texts = (_plain(column.cell(item)) for column in table.columns)
    return escaped("  ".join((*texts, table.about(item)))).lower()
