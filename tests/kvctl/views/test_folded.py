"""A large pair on the screen: engines first, then ranks that are alike in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvctl.views.topology.folded import ranges

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


def test_ranks_that_read_alike_are_one_row_each(run: Run) -> None:
    outcome = run(
        "describe-topology", "--model", "qwen3-32b", "--local", "tp=64", "--remote", "tp=32,layout=HND"
    )
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    readers = [line.split() for line in lines if line.startswith("tp") and " of " in line]
    assert [row[:3] for row in readers] == [[f"tp{8 * n}-tp{8 * n + 7}", "x8", str(n)] for n in range(8)]
    senders = lines[next(n for n, line in enumerate(lines) if line.startswith("SENDERS")) + 1 :]
    assert senders[0].split()[:3] == ["tp0-tp31", "x32", "2"]
    assert len(lines) < 40


def test_every_rank_is_there_for_who_asks(run: Run) -> None:
    wide = run(
        "describe-topology", "--model", "qwen3-32b", "--local", "tp=64", "--remote", "tp=32", "-o", "wide"
    )
    assert "READERS" not in wide.out
    assert {f"tp{n}" for n in range(64)} <= {line.split()[0] for line in wide.out.splitlines() if line}


def test_small_pairs_keep_their_matrix(run: Run) -> None:
    outcome = run("describe-topology", "--model", "qwen3-32b", "--local", "tp=4", "--remote", "tp=8")
    assert "READERS" not in outcome.out
    assert "sends" in outcome.out


def test_latents_have_no_heads(run: Run) -> None:
    outcome = run("describe-topology", "--model", "deepseek-v3", "--local", "tp=64", "--remote", "tp=64")
    assert [line.split()[:3] for line in outcome.out.splitlines() if line.startswith("tp0-")] == [
        ["tp0-tp63", "x64", "-"],
        ["tp0-tp63", "x64", "1"],
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["tp0"], "tp0"),
        (["tp2", "tp0", "tp1"], "tp0-tp2"),
        (["tp0", "tp2"], "tp0, tp2"),
        (["tp0.pp1", "tp1.pp1", "tp0"], "tp0, tp0.pp1-tp1.pp1"),
        ([f"tp{n}" for n in range(0, 20, 2)], "tp0, tp2, tp4, ... tp18"),
    ],
)
def test_runs_of_ranks(names: list[str], shown: str) -> None:
    assert ranges(names) == shown
