"""The demo when something does not start: exit code 1, a line that names it, its log, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.demo.models import EDITION, MARK

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")


def broken(package: str, folder: Path) -> Path:
    """A folder for PYTHONPATH in which that package cannot be imported."""
    path = folder / "broken" / package
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(f"raise ImportError('{package} is broken here')\n")
    return path.parent


def demo(tmp_path: Path, temporary: Path, package: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "TMPDIR": str(temporary),
        "PYTHONPATH": f"{broken(package, tmp_path)}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "demo", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert list(temporary.iterdir()) == []
    return done


def test_a_worker_that_does_not_start(tmp_path: Path, temporary: Path) -> None:
    done = demo(tmp_path, temporary, "nixl", "--simulate")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ImportError: nixl is broken here" in done.stderr or "NIXL does not load" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvctl: worker tp0 of prefill-engine: ")


def test_an_engine_that_does_not_start(tmp_path: Path, temporary: Path) -> None:
    models = tmp_path / "lasting" / "models"
    model = models / "qwen3.5-gdn"
    model.mkdir(parents=True)
    (model / MARK).write_text(json.dumps({"model": "qwen3.5-gdn", "edition": EDITION}))
    done = demo(tmp_path, temporary, "vllm", "--dir", str(models.parent))
    assert (done.returncode, done.stdout) == (1, "")
    assert "ImportError: vllm is broken here" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kvctl: the ")
    assert "engine did not start: ImportError: vllm is broken here; see the log above" in last
    assert sorted(path.name for path in models.parent.iterdir()) == ["models"]
