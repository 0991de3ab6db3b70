"""The cells of docs/recovery-matrix.md: which engines are tried, and which faults they have to survive."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from tests.support.matrix import MODES, Cell

FAULTS = {
    "before": "a miss forced before anything is read",
    "flight": "a miss forced in flight",
    "layers": "a miss forced after a part has arrived",
    "stopped": "the prefiller stopped (SIGSTOP) until the load is given up, then continued",
    "kvd": "the decoder's kvd killed (SIGKILL) while the load is on its way, then started again",
    "killed": "the prefiller killed (SIGKILL) while the load is on its way",
}
"""In the order in which a cell's engines meet them: the last one ends the prefiller."""

KINDS = (
    ("llama", True),
    ("llama", False),
    ("gemma3", True),
    ("gemma3", False),
    ("qwen3.5-gdn", True),
    ("qwen3.5-gdn", False),
    ("granite-hybrid", False),
    ("deepseek-v2", False),
)
"""Mamba2 and MLA without prefix caching: vLLM's CPU build does not run them with it."""
CELLS = tuple(
    Cell(model, caching, backend, mode)
    for (model, caching), backend, mode in itertools.product(KINDS, ("nixl", "mooncake"), MODES)
)
ALWAYS = (Cell("qwen3.5-gdn", True, "nixl", "pull"),)
"""What is part of every run."""

PAGE = """# Faults and what became of them

Written by `make e2e-recovery`; a run of some cells leaves the others as they were. Each row is a pair of vLLM
engines on a CPU, each column a fault that a request meets on its way:

{faults}

`recompute`: the answer is, token for token, what the decoder answers by itself. `reuse`: it is what the decoder answers
with the prefiller's KV, for models whose two answers differ. `both`: the two answers are the same. In every cell that
has one of these, the request came to its end by itself. In the end no request waited or ran, and every block of the
decoder was free. After every fault but the last one the next hand-over was right.

With {versions}.

| model | prefix caching | backend | mode | {columns} |
|---|---|---|---|{lines}
{rows}
"""


def page(found: Mapping[tuple[str, str], str], versions: Mapping[str, str]) -> str:
    """The page: ``found`` is what came of each cell and fault, by their names; ``versions`` what it was tried with."""
    rows = []
    for cell in CELLS:
        results = [found.get((name_of(cell), fault), "not run") for fault in FAULTS]
        caching = "on" if cell.caching else "off"
        rows.append(f"| {cell.model} | {caching} | {cell.backend} | {cell.mode} | {' | '.join(results)} |")
    return PAGE.format(
        faults="\n".join(f"- `{name}`: {what}" for name, what in FAULTS.items()),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        columns=" | ".join(FAULTS),
        lines="---|" * len(FAULTS),
        rows="\n".join(rows),
    )


def read(text: str) -> dict[tuple[str, str], str]:
    """What a page says was found."""
    found: dict[tuple[str, str], str] = {}
    for cell in CELLS:
        head = f"| {cell.model} | {'on' if cell.caching else 'off'} | {cell.backend} | {cell.mode} | "
        line = next((line for line in text.splitlines() if line.startswith(head)), None)
        if line is not None:
            results = line.removeprefix(head).removesuffix(" |").split(" | ")
            found |= {(name_of(cell), fault): r for fault, r in zip(FAULTS, results, strict=True)}
    return found


def name_of(cell: Cell) -> str:
    """One name for each cell of this matrix, whatever other pages call it."""
    return f"{cell.model}-{'cached' if cell.caching else 'uncached'}-{cell.backend}-{cell.mode}"
