"""The cells of docs/matrix.md: which backends, modes and kinds of cache are tried with each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.documents.demo import Mode

BACKENDS = ("nixl", "mooncake", "direct")
MODES: tuple[Mode, ...] = ("pull", "push")


@dataclass(frozen=True)
class Cell:
    """One deployment. ``caching`` is prefix caching; ``tp`` are the prefiller's and the decoder's workers."""

    model: str
    caching: bool
    backend: str
    mode: Mode
    tp: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        return f"{self.row}-{self.column}".replace(" ", "_")

    @property
    def row(self) -> str:
        """Its kind of cache, and the numbers of workers where there are several."""
        caching = {"qwen3.5-gdn": " cached" if self.caching else " uncached"}.get(self.model, "")
        return f"{self.model}{caching}" + ("" if self.tp == (1, 1) else " tp{} to tp{}".format(*self.tp))

    @property
    def column(self) -> str:
        """Its backend and mode."""
        return f"{self.backend} {self.mode}"


KINDS = (
    ("llama", True),
    ("qwen3.5-gdn", True),
    ("qwen3.5-gdn", False),
    ("gemma3", True),
    ("deepseek-v2", False),
)
RESHARDED = tuple(
    Cell(model, True, "nixl", "push", tp) for model in ("llama", "qwen3.5-gdn") for tp in ((1, 2), (2, 1))
)
CELLS = (
    *(
        Cell(model, caching, backend, mode)
        for (model, caching), backend, mode in itertools.product(KINDS, BACKENDS, MODES)
    ),
    *RESHARDED,
)
ALWAYS = (
    Cell("qwen3.5-gdn", True, "nixl", "push"),
    Cell("llama", True, "mooncake", "push"),
    Cell("gemma3", True, "direct", "push"),
)
"""Those that are part of every run: each backend once, each kind of group once."""


PAGE = """# What was tried with what

Written by `make e2e-matrix`. Each cell is a pair of vLLM engines on a CPU with that backend and mode. It is asked for
prompts of one prefill chunk and of many, in push in every order in which the two sides can hear of them; for eight
requests at once; for prefixes that one side has already. `equal`: every answer was, token for token, that of one engine
alone, every transfer stands in the ledger as done, and in the end no block was held.

With {versions}.

| model | {columns} |
|---|{lines}
{rows}
"""


def page(found: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """docs/matrix.md: ``found`` is what came of each cell, by its name; ``versions`` of what it was tried with."""
    columns = list(dict.fromkeys(cell.column for cell in CELLS))
    values = {(cell.row, cell.column): found.get(str(cell), "not run") for cell in CELLS}
    rows = [
        f"| {row} | {' | '.join(values.get((row, column), '-') for column in columns)} |"
        for row in dict.fromkeys(cell.row for cell in CELLS)
    ]
    return PAGE.format(
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        columns=" | ".join(columns),
        lines="---|" * len(columns),
        rows="\n".join(rows),
    )
