"""Draws the Topology document: for each pair a rank-by-rank matrix, groups, the cost of a request, what was found."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvctl.cli.numbers import rate, size, span
from kvctl.views.table import column_table
from kvctl.views.topology.document import Pair, Request, Topology
from kvctl.views.topology.flows import flows, partial_groups, rank_order, shape

NOTHING = "."
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}
SENDS, TAKES = "sends", "takes"
SHARE_LEGEND = "  N%  part of the bytes that the row's rank, reading, takes from the column's rank\n"
GROUP_LEGEND = "  gN  of these groups only\n"
NOTHING_LEGEND = "  .   nothing"


def topology_screen(body: Topology, wide: bool) -> RenderableType:
    """All pairs, one below the other."""
    parts: list[RenderableType] = []
    for pair in body.pairs:
        parts += [_pair(pair, wide), ""]
    return Group(*parts[:-1])


def _pair(pair: Pair, wide: bool) -> RenderableType:
    parts: list[RenderableType] = [_header(pair)]
    if pair.reads:
        matrix = Matrix(pair)
        legend = (
            SHARE_LEGEND + GROUP_LEGEND * any("g" in cell for cell in matrix.cells.values()) + NOTHING_LEGEND
        )
        parts += ["", matrix, "", Text(legend, style="dim"), "", _groups(pair)]
    if pair.request:
        parts += ["", _request(pair.request)]
    # A difference without a note costs nothing and is no news.
    factors = [f for f in pair.factors if wide or not f.ok or (f.local != f.remote and f.note)]
    if factors:
        rows: list[list[str | Text]] = [
            [
                f.name,
                f.local,
                f.remote,
                Text("yes", "green") if f.ok else Text("NO", "bold red"),
                f.note or "-",
            ]
            for f in factors
        ]
        parts += ["", column_table(["FACTOR", "LOCAL", "REMOTE", "OK", "NOTE"], rows)]
    if wide and pair.reads:
        parts += ["", _reads(pair)]
    for finding in pair.findings:
        parts += [
            "",
            Text(f"{finding.severity} {finding.code}: {finding.message}", SEVERITY_STYLES[finding.severity]),
        ]
        if finding.hint:
            parts.append(Padding(Text(finding.hint), (0, 0, 0, 2)))
    return Group(*parts)


def _header(pair: Pair) -> Text:
    text = Text.assemble(
        (pair.local.engine_id, "bold"), f" ({shape(pair.local)}) reads from ",
        (pair.remote.engine_id, "bold"), f" ({shape(pair.remote)}): ",
        ("compatible", "green") if pair.compatible else ("NOT compatible", "bold red"),
    )  # fmt: skip
    models = dict.fromkeys((pair.local.model, pair.remote.model))
    text.append(f"\n{' / '.join(models)}", style="dim")
    return text


def _groups(pair: Pair) -> RenderableType:
    rows = [
        [f"g{g.index}", g.kind, str(len(g.layers)), str(g.block_size or "state"), size(g.bytes_per_block)]
        for g in pair.groups
    ]
    return column_table(
        ["GROUP", "KIND", "LAYERS", "TOKENS/BLOCK", "BYTES/BLOCK"],
        rows,
        right="LAYERS TOKENS/BLOCK BYTES/BLOCK",
    )


def _request(request: Request) -> RenderableType:
    """What a request costs, in one line; the mean copy is that before coalescing."""
    busiest = max((*request.bytes_by_rank.values(), *request.bytes_by_local_rank.values()), default=0)
    headers = ["REQUEST", "BYTES", "COPIES", "COALESCED", "MEAN COPY", "BUSIEST RANK"]
    row = [
        f"{request.tokens} tokens",
        size(request.bytes),
        str(request.descriptors),
        str(request.coalesced_descriptors),
        size(request.bytes / max(1, request.descriptors)),
        size(busiest),
    ]
    if request.seconds is not None:
        headers.append("TIME")
        row.append(f"{span(request.seconds)} at {rate(request.bandwidth)} a rank")
    return column_table(headers, [row], right="BYTES COPIES COALESCED")


def _reads(pair: Pair) -> RenderableType:
    rows = [
        [
            r.local_rank,
            r.remote_rank,
            f"g{r.group}",
            "-" if r.heads is None else f"{r.heads[0]}-{r.heads[1] - 1}",
            str(r.layers),
            size(r.bytes_per_block),
            str(r.segments_per_block),
        ]
        for r in pair.reads
    ]
    headers = ["READER", "SOURCE", "GROUP", "HEADS", "LAYERS", "BYTES/BLOCK", "COPIES/BLOCK"]
    return column_table(headers, rows, right="LAYERS BYTES/BLOCK COPIES/BLOCK")


class Matrix:
    """Rows are local ranks, columns remote ranks. Columns that do not fit stand in further tables below.

    Where a request's cost is known, the last column is what each local rank takes and the last row what each remote
    one sends.
    """

    def __init__(self, pair: Pair) -> None:
        found = flows(pair)
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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The tables, as many as the width asks for."""
        del console
        widest = max(len(cell) for cell in (*self.cells.values(), *self.columns)) + 2
        left = max(len(row) for row in self.rows) + 2
        fitting = max(1, (options.max_width - left) // widest)
        for start in range(0, len(self.columns), fitting):
            columns = self.columns[start : start + fitting]
            if start:
                yield ""
            rows = [
                [row, *(self.cells.get((row, column), NOTHING) for column in columns)] for row in self.rows
            ]
            yield column_table(["", *columns], rows)

    def _add_sums(self, request: Request) -> None:
        for row in self.rows:
            self.cells[row, TAKES] = size(request.bytes_by_local_rank.get(row, 0))
        for column in self.columns:
            self.cells[SENDS, column] = size(request.bytes_by_rank.get(column, 0))
        self.cells[SENDS, TAKES] = size(request.bytes)
        self.rows.append(SENDS)
        self.columns.append(TAKES)
