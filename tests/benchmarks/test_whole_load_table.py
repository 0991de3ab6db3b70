"""The table of whole loads in docs/gpu.md: medians of the newer code, over the plain copies of their size."""

from __future__ import annotations

import json

from benchmarks.whole_load.table import page_table

PARTS = ("wake", "plan", "hand_over", "post", "moving", "device", "report", "whole")
ABOUT = {"memory": "block", "block": 16, "options": {}, "busy": False, "size": 256.0, "where": "a GPU, 1"}


def line(part: str, code: str, *whole: float, kind: str = "direct") -> str:
    runs = [dict.fromkeys(PARTS, 100.0) | {"whole": us} for us in whole]
    return json.dumps({"part": part, "code": code, "kind": kind, "runs": runs, **ABOUT})


def test_a_row_is_of_the_newer_code_and_in_the_middle_of_its_loads() -> None:
    drawn = page_table(
        [
            line("load", "before", 5000.0),
            line("load", "now", 1000.0, 9000.0),
            line("load", "now", 500.0),
            line("plain", "now", 800.0),
            line("plain", "before", 1.0),
            json.dumps({"part": "check", "code": "now", "wrong": 0}),
        ]
    )
    _, _, *rows = drawn.strip().splitlines()
    assert rows == [
        "| 1 GPU | direct | block | 16 |  |  | 256 MiB | 0.10 ms | 0.10 ms | 0.10 ms | 1.00 ms | 268 | 0.80 |"
    ]


def test_only_direct_reads_are_held_against_a_plain_copy() -> None:
    drawn = page_table([line("load", "now", 1000.0, kind="nixl"), line("plain", "now", 800.0)])
    assert drawn.strip().splitlines()[-1].endswith("| 268 |  |")
