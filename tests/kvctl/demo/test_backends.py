"""`kvctl demo --backend`: which one it takes, and that it needs no transfer engine with direct."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.demo.run import _backend
from kvctl.errors import UsageError


def absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # to Python, a module that cannot be found


@pytest.mark.parametrize("asked", ["direct", "auto"])
def test_what_needs_no_engine_is_taken_without_one(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent("nixl", monkeypatch)
    assert _backend(asked) == asked


def test_without_nixl_and_without_a_word_it_is_direct_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent("nixl", monkeypatch)
    assert _backend(None) == "direct"
    assert "NIXL is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "name"), [("nixl", "NIXL"), ("mooncake", "Mooncake")])
def test_an_engine_that_was_asked_for_and_is_missing_is_an_error(
    asked: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(asked, monkeypatch)
    with pytest.raises(UsageError, match=f"{name} is not installed") as refused:
        _backend(asked)
    assert "--backend direct" in refused.value.hint


def test_a_demo_without_any_engine(tmp_path: Path, temporary: Path) -> None:
    """The engines' modules cannot even be found, here or in the workers."""
    for name in ("nixl", "mooncake"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not for this test')\n")
    environ = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "demo", "--simulate", "--backend", "direct", "-o", "json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"]
    assert all(request["equal"] for request in document["requests"])
    assert document["topology"]["pairs"][0]["compatible"]
    assert list(temporary.iterdir()) == []
