"""The topology as dot, mermaid and svg: ranks are nodes, reads are edges with their bytes."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

PAIR = ("llama-3.1-70b:tp=4,layout=HND", "llama-3.1-70b:tp=8,layout=HND")
MISFIT = ("qwen3-32b:tp=4", "llama-3.1-8b:tp=8")
SVG = "{http://www.w3.org/2000/svg}"


def drawn(run: Run, form: str, pair: tuple[str, str] = PAIR) -> str:
    outcome = run("describe-topology", *pair, "-o", form)
    assert outcome.err == ""
    return outcome.out


def test_dot_has_a_node_a_rank_and_an_edge_a_read(run: Run) -> None:
    text = drawn(run, "dot")
    assert len(re.findall(r'^    "0 (remote|local) tp\d" \[label=', text, re.MULTILINE)) == 12
    assert '"0 remote tp7" -> "0 local tp3" [label="320 MiB", penwidth=3.0];' in text
    assert text.count("->") == 8


@pytest.mark.skipif(not shutil.which("dot"), reason="no graphviz here")
@pytest.mark.parametrize("pair", [PAIR, MISFIT])
def test_graphviz_can_read_it(run: Run, pair: tuple[str, str]) -> None:
    subprocess.run(
        ["dot", "-Tplain"], input=drawn(run, "dot", pair), text=True, check=True, capture_output=True
    )


def test_mermaid_has_a_node_a_rank_and_an_edge_a_read(run: Run) -> None:
    lines = drawn(run, "mermaid").splitlines()
    assert lines[0] == "flowchart LR"
    assert '  p0s_tp7 -->|"320 MiB"| p0r_tp3' in lines
    assert sum("-->" in line for line in lines) == 8
    assert sum(line == "  end" for line in lines) == 2


def test_svg_is_one_file_with_nothing_from_elsewhere(run: Run) -> None:
    text = drawn(run, "svg")
    root = ET.fromstring(text)  # noqa: S314  (our own output)
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f"{SVG}path")) == 8
    assert len([box for box in root.findall(f"{SVG}rect") if box.get("class") == "node"]) == 12
    assert "tp3 takes 320 MiB from tp7" in [title.text for title in root.iter(f"{SVG}title")]
    assert not re.search(r"href|url\(|@import|<script|<image", text)


def test_everything_in_the_svg_stands_inside_its_frame(run: Run) -> None:
    for pair in (PAIR, MISFIT, ("qwen3-next-80b-a3b:tp=4", "qwen3-next-80b-a3b:tp=2,pp=2")):
        root = ET.fromstring(drawn(run, "svg", pair))  # noqa: S314
        width, height = int(root.get("width", "0")), int(root.get("height", "0"))
        for element in (*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}text")):
            x, y = int(element.get("x", "0")), int(element.get("y", "0"))
            assert 0 <= x + int(element.get("width", "0")) <= width
            assert 0 <= y + int(element.get("height", "0")) <= height


@pytest.mark.parametrize("form", ["dot", "mermaid", "svg"])
def test_a_pair_that_does_not_fit_says_so(run: Run, form: str) -> None:
    outcome = run("describe-topology", *MISFIT, "-o", form)
    assert outcome.code == 1
    assert "NOT compatible" in outcome.out


def test_names_cannot_break_out_of_a_drawing() -> None:
    from kvctl.views.topology.document import PairDocument, Topology
    from kvctl.views.topology.dot import topology_dot
    from kvctl.views.topology.mermaid import topology_mermaid
    from kvctl.views.topology.svg import topology_svg
    from kvd.topology.describe import EngineSummary

    end = EngineSummary(
        engine_id='a"<b>\\#', generation="", model="m&m", tp=1, pp=1, dcp=1, block_sizes=(16,)
    )
    body = Topology(
        pairs=(
            PairDocument(
                local=end, remote=end, compatible=True, factors=(), groups=(), reads=(), findings=()
            ),
        )
    )
    ET.fromstring(topology_svg(body))  # noqa: S314
    assert 'label="a\\"<b>\\\\# sends' in topology_dot(body)
    assert '["a#quot;<b>\\#35; sends' in topology_mermaid(body)


def test_only_topologies_can_be_drawn(run: Run) -> None:
    outcome = run("version", "--client", "-o", "svg")
    assert outcome.code == 2
    assert "'svg' is not one of table" in outcome.err
