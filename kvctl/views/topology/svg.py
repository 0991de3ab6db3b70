"""The Topology document as a self-contained SVG: sources on the left, readers on the right, a curve for each read.

Graphviz can draw the same (``kvctl describe-topology -o dot | dot -Tsvg``), but pip does not bring it, and
a picture must take no more than kvctl itself.
"""

from __future__ import annotations

import colorsys
import textwrap
from dataclasses import dataclass
from html import escape

from kvctl.cli.numbers import size
from kvctl.views.topology.document import PairDocument, Topology
from kvctl.views.topology.flows import Flow, flows, label, least_time, rank_names, shape
from kvd.shown import escaped

WIDTH = 960
MARGIN = 32
NODE_WIDTH = 132
SLOT = 18
"""Pixels between two curves that end at one node, enough for a label on each."""
NODE_GAP = 10
HEAD = 104
"""Pixels above the first node of a pair: its title and the names of both engines."""
LABELS = 160
"""Curves above which their labels would only cover each other; the numbers stay in each curve's tooltip."""
INDENT = 18
LINE_CHARACTERS = 132
"""Of the small text that fits in a line."""

STYLE = (
    "text{font-family:'DejaVu Sans',Verdana,sans-serif;font-size:12px;fill:#0f172a}"
    ".title{font-size:17px;font-weight:bold}.dim{fill:#64748b}.small{font-size:10.5px}"
    ".engine{font-weight:bold;font-size:13px}.bad{fill:#b91c1c;font-weight:bold}.good{fill:#15803d}"
    ".warning{fill:#b45309}.error{fill:#b91c1c}.node{fill:#f1f5f9;stroke:#94a3b8}"
    ".flow{fill:none;stroke-opacity:.65}.label{font-size:9.5px;fill:#334155;paint-order:stroke;stroke:#ffffff;stroke-width:3px}"
    ".paper{fill:#ffffff}"
    # What knows no media queries draws it light.
    "@media (prefers-color-scheme:dark){"
    "text{fill:#e2e8f0}.dim{fill:#a3b1c6}.bad,.error{fill:#fca5a5}.good{fill:#4ade80}.warning{fill:#fbbf24}"
    ".node{fill:#1e293b;stroke:#64748b}.paper{fill:#0f172a}.label{fill:#cbd5e1;stroke:#0f172a}"
    ".flow{stroke-opacity:1;filter:brightness(1.6)}}"
)


@dataclass(frozen=True)
class Node:
    """A rank's box: its corner, height, and where the curve of each rank of the other side ends, from top to bottom."""

    name: str
    x: int
    y: int
    height: int
    ports: dict[str, int]


def topology_svg(body: Topology) -> str:
    """The drawing, pairs one below the other."""
    parts: list[str] = []
    top = MARGIN
    for pair in body.pairs:
        drawn, height = _pair(pair, top)
        parts += drawn
        top += height + MARGIN
    size = f'viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}"'
    narrow = 'style="max-width:100%;height:auto"'  # narrower where a page is
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {narrow}>',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{top}"/>',
            *parts,
            "</svg>",
            "",
        )
    )


def _pair(pair: PairDocument, top: int) -> tuple[list[str], int]:
    """The drawing of a pair whose first pixel row is ``top``, and its height."""
    found = flows(pair)
    readers_of = {
        name: [flow.local for flow in found if flow.remote == name] for name in rank_names(pair.remote)
    }
    sources_of = {
        name: [flow.remote for flow in found if flow.local == name] for name in rank_names(pair.local)
    }
    heights = (_height(readers_of), _height(sources_of))
    tallest = max(heights)
    right = WIDTH - MARGIN - NODE_WIDTH
    sources = _column(readers_of, MARGIN, top + HEAD + (tallest - heights[0]) // 2)
    readers = _column(sources_of, right, top + HEAD + (tallest - heights[1]) // 2)
    notes = _notes(pair)
    parts = [
        *_head(pair, top),
        *_curves(pair, found, sources, readers),
        *_boxes(sources, pair.request.bytes_by_rank if pair.request else {}, "sends"),
        *_boxes(readers, pair.request.bytes_by_local_rank if pair.request else {}, "takes"),
    ]
    below = top + HEAD + tallest + 24
    parts += [
        _text(MARGIN + indent, below + 17 * i, line, f"small {kind}")
        for i, (indent, line, kind) in enumerate(notes)
    ]
    return parts, HEAD + tallest + 24 + 17 * len(notes)


def _head(pair: PairDocument, top: int) -> list[str]:
    fits = ("compatible", "good") if pair.compatible else ("NOT compatible", "bad")
    title = f"{pair.local.engine_id} reads from {pair.remote.engine_id}"
    # A title in a large bold face is about 10 pixels a character.
    fitted = title if len(title) <= 88 else f"{title[:87]}…"
    models = " / ".join(dict.fromkeys((pair.local.model, pair.remote.model)))
    return [
        _text(MARGIN, top + 8, fitted, "title"),
        _text(MARGIN, top + 30, f"{models}{_cost(pair)}", "dim"),
        _text(WIDTH - MARGIN, top + 30, *fits, anchor="end"),
        _text(MARGIN, top + 68, "read from", "engine"),
        _text(MARGIN, top + 86, shape(pair.remote), "small dim"),
        _text(WIDTH - MARGIN, top + 68, "reading", "engine", anchor="end"),
        _text(WIDTH - MARGIN, top + 86, shape(pair.local), "small dim", anchor="end"),
    ]


def _cost(pair: PairDocument) -> str:
    request = pair.request
    if request is None:
        return ""
    copies = f"{request.descriptors:,} copies, {request.coalesced_descriptors:,} coalesced"
    time = f", {least_time(request)}" if request.seconds is not None else ""
    return f" · {request.tokens:,} tokens: {size(request.bytes)} in {copies}{time}"


def _node_height(ends: list[str]) -> int:
    return max(38, SLOT * len(ends) + 8)


def _height(others: dict[str, list[str]]) -> int:
    return sum(_node_height(ends) + NODE_GAP for ends in others.values()) - NODE_GAP


def _column(others: dict[str, list[str]], x: int, top: int) -> dict[str, Node]:
    """The boxes of one side, from ``top`` down; ``others`` are the ranks of the other side of each, in order."""
    nodes: dict[str, Node] = {}
    for name, ends in others.items():
        height = _node_height(ends)
        first = top + height // 2 - SLOT * (len(ends) - 1) // 2
        nodes[name] = Node(name, x, top, height, {other: first + SLOT * i for i, other in enumerate(ends)})
        top += height + NODE_GAP
    return nodes


def _boxes(nodes: dict[str, Node], load: dict[str, int], verb: str) -> list[str]:
    parts = []
    for node in nodes.values():
        middle = node.y + node.height // 2
        extent = f'width="{NODE_WIDTH}" height="{node.height}"'
        parts += [
            f'<rect class="node" x="{node.x}" y="{node.y}" {extent} rx="6"/>',
            _text(node.x + NODE_WIDTH // 2, middle - (3 if load else -4), node.name, anchor="middle"),
        ]
        if load:
            said = f"{verb} {size(load.get(node.name, 0))}"
            parts.append(_text(node.x + NODE_WIDTH // 2, middle + 12, said, "small dim", anchor="middle"))
    return parts


def _curves(
    pair: PairDocument, found: tuple[Flow, ...], sources: dict[str, Node], readers: dict[str, Node]
) -> list[str]:
    most = max((flow.bytes for flow in found), default=1) or 1
    order = {name: i for i, name in enumerate(sources)}
    curves, labels = [], []
    for flow in found:
        source, reader = sources[flow.remote], readers[flow.local]
        x1, y1 = source.x + NODE_WIDTH, source.ports[flow.local]
        x2, y2 = reader.x, reader.ports[flow.remote]
        said = label(pair, flow)
        curves.append(
            f'<path class="flow" d="M{x1} {y1} C{x1 + 240} {y1} {x2 - 240} {y2} {x2} {y2}"'
            f' stroke="{_colour(order[flow.remote], len(order))}" stroke-width="{1 + 3 * flow.bytes / most:.1f}">'
            f"<title>{_plain(f'{flow.local} takes {said} from {flow.remote}')}</title></path>"
        )
        labels.append(_text(x2 - 6, y2 - 4, f"{said} from {flow.remote}", "label", anchor="end"))
    return curves + (labels if len(labels) <= LABELS else [])


def _notes(pair: PairDocument) -> list[tuple[int, str, str]]:
    """The legend and the findings: lines of text, each with its indent in pixels and its class."""
    what = "of the request" if pair.request else "of one block of each group"
    notes = []
    if pair.reads:
        legend = f"a curve is what a rank takes from another: bytes {what}; gN: of these groups only"
        notes.append((0, legend, "dim"))
    for finding in pair.findings:
        said = f"{finding.severity} {finding.code}: {finding.message}"
        for indent, text, kind in ((0, said, finding.severity), (INDENT, finding.hint, "dim")):
            lines = textwrap.wrap(text, LINE_CHARACTERS)
            notes += [(indent if i == 0 else INDENT, line, kind) for i, line in enumerate(lines)]
    return notes


def _text(x: int, y: int, text: str, style: str = "", *, anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{kind}>{_plain(text)}</text>'


def _colour(number: int, of: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(0.58 + number / max(1, of), 0.42, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _plain(text: str) -> str:
    """Text as it may stand in XML, which has no control characters."""
    return escape(escaped(text))
