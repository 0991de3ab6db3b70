"""The Topology document as a Mermaid flowchart, as Markdown pages show it; data flows left to right."""

from __future__ import annotations

from kvctl.views.topology.document import PairDocument, Topology
from kvctl.views.topology.flows import flows, label, rank_names, shape
from kvd.shown import escaped
from kvd.topology.describe import EngineSummary


def topology_mermaid(body: Topology) -> str:
    """One flowchart; each pair has a subgraph for the engine read from and one for the reader."""
    lines = ["flowchart LR"]
    for number, pair in enumerate(body.pairs):
        lines += _pair(number, pair)
    return "\n".join([*lines, ""])


def _pair(number: int, pair: PairDocument) -> list[str]:
    sources, readers = f"p{number}s", f"p{number}r"
    lines = [*_subgraph(sources, pair.remote, "sends"), *_subgraph(readers, pair.local, "reads")]
    for flow in flows(pair):
        arrow = f"-->|{_quoted(label(pair, flow))}|"
        lines.append(f"  {_node(sources, flow.remote)} {arrow} {_node(readers, flow.local)}")
    if not pair.compatible:
        lines.append(f'  {sources} -. "NOT compatible" .-> {readers}')
    return lines


def _subgraph(name: str, engine: EngineSummary, verb: str) -> list[str]:
    return [
        f"  subgraph {name}[{_quoted(f'{engine.engine_id} {verb} ({shape(engine)})')}]",
        "    direction TB",
        *(f"    {_node(name, rank)}[{_quoted(rank)}]" for rank in rank_names(engine)),
        "  end",
    ]


def _node(subgraph: str, rank: str) -> str:
    return f"{subgraph}_{rank.replace('.', '_')}"


def _quoted(text: str) -> str:
    # Inside quotes Mermaid takes entities in place of quotes and of the sign that begins them.
    quoted = escaped(text).replace("#", "#35;").replace('"', "#quot;")
    return f'"{quoted}"'
