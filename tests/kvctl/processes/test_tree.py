"""Who is below whom among processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.processes import tree

NESTED = "sh -c 'sleep 60 & echo third $!; wait' & echo second $!; wait"


@pytest.fixture
def nested() -> Iterator[tuple[int, int, int]]:
    """Process ids of a shell, of a shell below it, and of what that one runs."""
    with subprocess.Popen(["/bin/sh", "-c", NESTED], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        named = dict(shell.stdout.readline().split() for _ in range(2))
        nested = shell.pid, int(named["second"]), int(named["third"])
        yield nested
        # Parents first: one whose child has died ends by itself, and its process id may be gone.
        for pid in nested:
            os.kill(pid, 9)


def test_parents_come_before_children(nested: tuple[int, int, int]) -> None:
    shell, second, third = nested
    assert tree.children(shell) == [second]
    assert tree.descendants(shell) == [second, third]


def test_all_processes_are_looked_at_once_however_many_descend(
    nested: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    once = Path.iterdir

    def counted(path: Path) -> Iterator[Path]:
        looks.append(path)
        return once(path)

    monkeypatch.setattr(Path, "iterdir", counted)
    assert len(tree.descendants(nested[0])) == 2
    assert len(looks) == 1
