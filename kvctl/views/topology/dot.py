"""The Topology document as Graphviz: ranks are nodes, reads are edges with their bytes; data flows left to right."""

from __future__ import annotations

from kvctl.views.topology.document import PairDocument, Topology
from kvctl.views.topology.flows import Flow, flows, label, rank_names, shape
from kvd.shown import escaped
from kvd.topology.describe import EngineSummary


def topology_dot(body: Topology) -> str:
    """One directed graph; each pair has a cluster for the engine read from and one for the reader."""
    lines = [
        "digraph topology {",
        "  rankdir=LR; ranksep=2; nodesep=0.15;",
        '  node [shape=box, style="rounded,filled", fillcolor="#f1f5f9", fontname="sans-serif", fontsize=11];',
        '  edge [fontname="sans-serif", fontsize=9, color="#475569"];',
    ]
    for number, pair in enumerate(body.pairs):
        lines += _pair(number, pair)
    return "\n".join([*lines, "}", ""])


def _pair(number: int, pair: PairDocument) -> list[str]:
    found = flows(pair)
    most = max((flow.bytes for flow in found), default=1) or 1
    lines = [
        *_cluster(number, "remote", pair.remote, "sends"),
        *_cluster(number, "local", pair.local, "reads"),
    ]
    lines += [_edge(number, pair, flow, most) for flow in found]
    if not pair.compatible:
        first, last = rank_names(pair.remote)[0], rank_names(pair.local)[0]
        lines.append(
            f"  {_id(number, 'remote', first)} -> {_id(number, 'local', last)}"
            ' [style=dashed, color=red, fontcolor=red, label="NOT compatible"];'
        )
    return lines


def _cluster(number: int, side: str, engine: EngineSummary, verb: str) -> list[str]:
    name = f"{engine.engine_id} {verb} ({shape(engine)})"
    return [
        f"  subgraph {_quoted(f'cluster_{number}_{side}')} {{",
        f'    label={_quoted(name)}; fontname="sans-serif"; fontsize=12; color="#94a3b8";',
        *(f"    {_id(number, side, rank)} [label={_quoted(rank)}];" for rank in rank_names(engine)),
        "  }",
    ]


def _edge(number: int, pair: PairDocument, flow: Flow, most: int) -> str:
    return (
        f"  {_id(number, 'remote', flow.remote)} -> {_id(number, 'local', flow.local)}"
        f" [label={_quoted(label(pair, flow))}, penwidth={0.5 + 2.5 * flow.bytes / most:.1f}];"
    )


def _id(number: int, side: str, rank: str) -> str:
    return _quoted(f"{number} {side} {rank}")


def _quoted(text: str) -> str:
    quoted = escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'
