"""Draws the Topology document: for each pair a rank-by-rank matrix, the groups, what differs, what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvctl.documents.topology import EngineEnd, Pair, Topology
from kvctl.render.numbers import size
from kvctl.render.table import column_table

NOTHING = "."
SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "info": ""}
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
        (pair.local.engine_id, "bold"), f" ({_shape(pair.local)}) reads from ",
        (pair.remote.engine_id, "bold"), f" ({_shape(pair.remote)}): ",
        ("compatible", "green") if pair.compatible else ("NOT compatible", "bold red"),
    )  # fmt: skip
    models = dict.fromkeys((pair.local.model, pair.remote.model))
    text.append(f"\n{' / '.join(models)}", style="dim")
    return text


def _shape(engine: EngineEnd) -> str:
    sizes = [f"tp{engine.tp}", f"pp{engine.pp}" * (engine.pp > 1), f"dcp{engine.dcp}" * (engine.dcp > 1)]
    blocks = " and ".join(str(n) for n in dict.fromkeys(engine.block_sizes))
    return " ".join(s for s in sizes if s) + (f", blocks of {blocks}" if blocks else "")


def _groups(pair: Pair) -> RenderableType:
    rows = [
        [f"g{g.index}", g.kind, str(len(g.layers)), str(g.block_size), size(g.bytes_per_block)]
        for g in pair.groups
    ]
    return column_table(
        ["GROUP", "KIND", "LAYERS", "TOKENS/BLOCK", "BYTES/BLOCK"],
        rows,
        right="LAYERS TOKENS/BLOCK BYTES/BLOCK",
    )


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
    """Rows are local ranks, columns remote ranks. Columns that do not fit stand in further tables below."""

    def __init__(self, pair: Pair) -> None:
        self.rows = sorted({read.local_rank for read in pair.reads}, key=_order)
        self.columns = sorted({read.remote_rank for read in pair.reads}, key=_order)
        self.cells = _cells(pair)

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


def _order(name: str) -> tuple[int, ...]:
    """Ranks in the order of their numbers: tp10 after tp9, all of one pp stage together."""
    parts = dict.fromkeys(("pp", "dcp", "tp"), 0)
    for part in name.split("."):
        label = part.rstrip("0123456789")
        parts[label] = int(part[len(label) :] or 0)
    return tuple(parts.values())


def _cells(pair: Pair) -> dict[tuple[str, str], str]:
    """What stands in the matrix for each (local, remote): the share of bytes, and the groups unless it is all."""
    every_group = {read.group for read in pair.reads}
    taken: dict[tuple[str, str], float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for read in pair.reads:
        key = read.local_rank, read.remote_rank
        weight = float(read.bytes_per_block * read.layers)
        taken[key] += weight
        total[read.local_rank] += weight
        if read.group not in groups[key]:
            groups[key].append(read.group)
    return {
        key: f"{100 * share / (total[key[0]] or 1):.0f}%"
        + (
            ""
            if len(groups[key]) == len(every_group)
            else " " + "".join(f"g{g}" for g in sorted(groups[key]))
        )
        for key, share in taken.items()
    }
