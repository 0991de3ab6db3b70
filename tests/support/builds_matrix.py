"""The table of docs/builds.md: which vLLM was run with which engines, and what came of it."""

from __future__ import annotations

import re

from tests.support.matrix import Cell

COLUMNS = {
    "handed over": "prompts of 100, 400 and 1000 tokens without a fault",
    "flight": "a miss forced in flight",
    "layers": "a miss forced after a part has arrived",
    "killed": "the prefiller killed (SIGKILL) while the load is on its way",
}
"""In the order in which a pair of engines meets them."""

CELLS = (
    Cell("llama", True, "nixl", "pull"),
    Cell("llama", True, "nixl", "push"),
    Cell("gemma3", True, "nixl", "pull"),
    Cell("gemma3", True, "nixl", "push"),
    Cell("qwen3-next", True, "nixl", "pull"),
    Cell("qwen3-next", True, "nixl", "push"),
    Cell("granite-hybrid", False, "nixl", "pull"),
    Cell("granite-hybrid", False, "nixl", "push"),
    Cell("deepseek-v2", False, "nixl", "pull"),
    Cell("deepseek-v2", False, "nixl", "push"),
)
TABLE = re.compile(r"(?<=<!-- written by `make e2e-builds` -->\n).*?(?=<!-- end -->)", re.DOTALL)
NOT_RUN = "not run"


def noted(page: str, version: str, cell: Cell, column: str, result: str) -> str:
    """The page with one result more."""
    rows = _rows(page)
    row = rows.setdefault((version, cell.model, cell.mode), dict.fromkeys(COLUMNS, NOT_RUN))
    row[column] = result
    order: dict[tuple[str, ...], int] = {(c.model, c.mode): i for i, c in enumerate(CELLS)}
    lines = [
        f"| {' | '.join((*key, *found.values()))} |"
        for key, found in sorted(rows.items(), key=lambda item: (item[0][0], order[item[0][1:]]))
    ]
    head = f"| vLLM | model | mode | {' | '.join(COLUMNS)} |\n|---|---|---|{'---|' * len(COLUMNS)}\n"
    text = f"\n{head}" + "\n".join(lines) + "\n\n"
    return TABLE.sub(lambda _match: text, page, count=1)


def _rows(page: str) -> dict[tuple[str, str, str], dict[str, str]]:
    found = TABLE.search(page)
    rows = {}
    for line in found.group().splitlines() if found else ():
        cells = line.strip("|").split("|")
        if len(cells) == 3 + len(COLUMNS) and cells[0].strip()[:1].isdigit():
            version, model, mode, *results = (text.strip() for text in cells)
            rows[version, model, mode] = dict(zip(COLUMNS, results, strict=True))
    return rows
