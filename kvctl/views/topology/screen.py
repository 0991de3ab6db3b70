"""Draws the Topology document: for each pair a rank-by-rank matrix, groups, the cost of a request, what was found."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.cli.numbers import size
from kvctl.views.screen import (
    Column,
    Indented,
    ScreenPart,
    Styled,
    TextTable,
    number,
    spaced,
    table,
    yes_or_no,
)
from kvctl.views.topology.document import PairDocument, PairFactor, RequestDocument, Topology
from kvctl.views.topology.flows import Flow, flows, least_time, partial_groups, rank_order, shape
from kvctl.views.topology.folded import folded, is_large
from kvctl.views.topology.localities import localities_screen

NOTHING = "."
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}
SENDS, TAKES = "sends", "takes"
SHARE_LEGEND = "  N%  part of the bytes that the row's rank reads from the column's rank"
GROUP_LEGEND = "  gN  of these groups only"
NOTHING_LEGEND = "  .   nothing"


def topology_screen(body: Topology, wide: bool) -> ScreenPart:
    """All pairs, one below the other."""
    parts: list[ScreenPart] = []
    for pair in body.pairs:
        parts += [pair_screen(pair, wide), ""]
    return [*parts[:-1], *localities_screen(body.workers, wide)]


def pair_screen(pair: PairDocument, wide: bool) -> ScreenPart:
    """One pair, whole."""
    parts: list[ScreenPart] = [_header(pair)]
    found = flows(pair)
    large = not wide and is_large(found)
    if large:
        # The engines first, then their ranks.
        parts += [
            "",
            _groups(pair),
            *(["", _request(pair.request)] if pair.request else []),
            "",
            folded(pair, found),
        ]
    elif pair.reads:
        matrix = Matrix(pair, found)
        in_groups = any("g" in cell for cell in matrix.cells.values())
        legend = [SHARE_LEGEND, *[GROUP_LEGEND] * in_groups, NOTHING_LEGEND]
        parts += ["", matrix.fitted, "", *(Styled(line, "dim") for line in legend), "", _groups(pair)]
    if pair.request and not large:
        parts += ["", _request(pair.request)]
    # A difference without a note costs nothing and is no news.
    factors = [f for f in pair.factors if wide or not f.ok or (f.local != f.remote and f.note)]
    if factors:
        parts += ["", _factors(factors)]
    if wide and pair.reads:
        parts += ["", _reads(pair)]
    for finding in pair.findings:
        said = f"{finding.severity} {finding.code}: {finding.message}"
        parts += ["", Styled(said, SEVERITY_STYLES[finding.severity])]
        if finding.hint:
            parts.append(Indented(finding.hint))
    return parts


def _header(pair: PairDocument) -> ScreenPart:
    models = dict.fromkeys(model or "model unknown" for model in (pair.local.model, pair.remote.model))
    said = (
        Styled(pair.local.engine_id, "bold"), f" ({shape(pair.local)}) reads from ",
        Styled(pair.remote.engine_id, "bold"), f" ({shape(pair.remote)}): ",
        Styled("compatible", "green") if pair.compatible else Styled("NOT compatible", "bold red"),
    )  # fmt: skip
    return [said, Styled(" / ".join(models), "dim")]


def _factors(factors: Sequence[PairFactor]) -> ScreenPart:
    return table(
        factors,
        Column("FACTOR", lambda f: f.name),
        Column("LOCAL", lambda f: f.local),
        Column("REMOTE", lambda f: f.remote),
        Column("OK", lambda f: yes_or_no(good=f.ok)),
        Column("NOTE", lambda f: f.note or "-"),
    )


def _groups(pair: PairDocument) -> ScreenPart:
    return table(
        pair.groups,
        Column("GROUP", lambda g: f"g{g.index}"),
        Column("KIND", lambda g: g.kind),
        number("LAYERS", lambda g: len(g.layers)),
        number("TOKENS/BLOCK", lambda g: g.block_size or "state"),
        number("BYTES/BLOCK", lambda g: size(g.bytes_per_block)),
    )


def _request(request: RequestDocument) -> ScreenPart:
    """What a request costs, in one line; the mean copy is that before coalescing."""
    busiest = max((*request.bytes_by_rank.values(), *request.bytes_by_local_rank.values()), default=0)
    return table(
        (request,),
        Column("REQUEST", lambda r: f"{r.tokens} tokens"),
        number("BYTES", lambda r: size(r.bytes)),
        number("COPIES", lambda r: r.descriptors),
        number("COALESCED", lambda r: r.coalesced_descriptors),
        Column("MEAN COPY", lambda r: size(r.bytes / max(1, r.descriptors))),
        Column("BUSIEST RANK", lambda _: size(busiest)),
        Column("TIME", least_time, request.seconds is not None),
    )


def _reads(pair: PairDocument) -> ScreenPart:
    return table(
        pair.reads,
        Column("READER", lambda r: r.local_rank),
        Column("SOURCE", lambda r: r.remote_rank),
        Column("GROUP", lambda r: f"g{r.group}"),
        Column("HEADS", lambda r: None if r.heads is None else f"{r.heads[0]}-{r.heads[1] - 1}"),
        number("LAYERS", lambda r: r.layers),
        number("BYTES/BLOCK", lambda r: size(r.bytes_per_block)),
        number("COPIES/BLOCK", lambda r: r.segments_per_block),
    )


class Matrix:
    """Rows are local ranks, columns remote ranks. Columns that do not fit stand in further tables below.

    Where a request's cost is known, the last column is what each local rank takes and the last row what each remote
    one sends.
    """

    def __init__(self, pair: PairDocument, found: Sequence[Flow]) -> None:
        self.rows = sorted({flow.local for flow in found}, key=rank_order)
        self.columns = sorted({flow.remote for flow in found}, key=rank_order)
        total: dict[str, int] = {}
        for flow in found:
            total[flow.local] = total.get(flow.local, 0) + flow.bytes
        self.cells = {
            (flow.local, flow.remote): f"{100 * flow.bytes / (total[flow.local] or 1):.0f}% "
            f"{partial_groups(pair, flow)}".rstrip()
            for flow in found
        }
        if pair.request:
            self._add_sums(pair.request)

    def fitted(self, width: int) -> list[ScreenPart]:
        """The tables, as many as the width asks for."""
        widest = max(len(cell) for cell in (*self.cells.values(), *self.columns)) + 2
        left = max(len(row) for row in self.rows) + 2
        fitting = max(1, (width - left) // widest)
        return spaced(
            TextTable(
                ["", *columns],
                [[row, *(self.cells.get((row, column), NOTHING) for column in columns)] for row in self.rows],
            )
            for start in range(0, len(self.columns), fitting)
            for columns in (self.columns[start : start + fitting],)
        )

    def _add_sums(self, request: RequestDocument) -> None:
        for row in self.rows:
            self.cells[row, TAKES] = size(request.bytes_by_local_rank.get(row, 0))
        for column in self.columns:
            self.cells[SENDS, column] = size(request.bytes_by_rank.get(column, 0))
        self.cells[SENDS, TAKES] = size(request.bytes)
        self.rows.append(SENDS)
        self.columns.append(TAKES)
