"""NIXL windows taken away from real writers: whatever these do, nothing lands afterwards, and everybody lives."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.backends.errors import BackendUnavailable
from kvd.backends.nixl.backend import open_backend
from kvd.backends.nixl.window import refusal
from kvd.geometry.model import Region

pytest.importorskip("nixl", exc_type=ImportError)

SCRIPT = Path(__file__).parents[3] / "support" / "nixl_windows.py"
SIZE, PIECES = 64 << 20, 16384
CASES = {
    "": ["close:address", "close:number", "keep:address", "unshielded:address", "crowd:address"],
    "tcp,self": [
        *("close:address", "close:number", "keep:number", "abandon:address", "crowd:number"),
        *("kill:address", "kill-keep:address"),
    ],
}
Found = dict[str, Any]


@lru_cache(maxsize=2)
def ran(transports: str) -> Found:
    """Run all cases over ``transports``; the script must end with 0 and print one line and nothing else."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    if transports:
        environ["UCX_TLS"] = transports
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(SIZE), str(PIECES), *CASES[transports]],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    found: Found = json.loads(lines[0])
    return found


def cases(which: str) -> pytest.MarkDecorator:
    """Parameters: the transports, and each case of that name over them."""
    chosen = [
        (tls, case) for tls, names in CASES.items() for case in names if case.partition(":")[0] == which
    ]
    names = [f"{tls or 'all'}-{case}" for tls, case in chosen]
    return pytest.mark.parametrize(("transports", "case"), chosen, ids=names)


slow = pytest.mark.slow


@slow
@cases("close")
def test_nothing_lands_after_close_from_a_writer_that_was_stopped(transports: str, case: str) -> None:
    found = ran(transports)[case]
    assert found["first"]["state"] == "done"
    assert found["missing"] > 0
    assert found["waiting"] > 0
    assert found["landed"] == 0
    assert found["write"]["state"] == "failed"
    assert "NIXL_ERR_REMOTE_DISCONNECT" in found["write"]["reason"]
    assert found["again"] == "done"
    assert found["complete"] is True


@slow
@cases("keep")
def test_everything_lands_without_close(transports: str, case: str) -> None:
    found = ran(transports)[case]
    assert found["write"]["state"] == "done"
    assert found["landed"] == found["missing"] > 0


@slow
@cases("unshielded")
def test_a_window_that_cma_can_reach_is_written_after_its_end(transports: str, case: str) -> None:
    """What the shield of `kvd.backends.nixl.window` is for does happen."""
    found = ran(transports)[case]
    if not found["before"]:
        pytest.skip("CMA is not permitted here: the writer used tcp")
    assert found["write"]["state"] == "done"
    assert found["landed"] == found["missing"] > 0


@slow
@cases("kill")
def test_nothing_lands_after_close_from_a_writer_that_was_killed(transports: str, case: str) -> None:
    found = ran(transports)[case]
    assert found["waiting"] > 0
    assert found["landed"] == 0


@slow
@cases("kill-keep")
def test_bytes_of_a_killed_writer_land_without_close(transports: str, case: str) -> None:
    assert ran(transports)[case]["landed"] > 0


@slow
@cases("abandon")
def test_a_write_that_its_lane_gave_up_still_lands(transports: str, case: str) -> None:
    """So a writer that closed its lane on an unfinished write cannot say that nothing of it will come."""
    found = ran(transports)[case]
    assert found["write"]["state"] == "pending"
    assert found["landed"] > 0


@slow
@cases("crowd")
def test_a_window_closed_in_the_middle_of_writes_harms_no_other(transports: str, case: str) -> None:
    found = ran(transports)[case]
    for turn in found["rounds"]:
        assert turn["late"] == 0
        assert turn["second"] == turn["spared"] == "done"
        assert turn["theirs"] is True
        assert turn["mine"] is True
        assert turn["doomed"] in {"failed", "done"}  # done where all had landed before the end
    assert found["rounds"][0]["doomed"] == "failed"


@slow
@pytest.mark.parametrize("transports", list(CASES), ids=["all", "tcp"])
def test_all_writers_survive_but_the_killed_ones(transports: str) -> None:
    killed = sum(case.startswith("kill") for case in CASES[transports])
    assert ran(transports)["alive"]["writers"] == [True] * (2 - killed)


def test_refusals(tmp_path: Path) -> None:
    host, device = [Region(4096, 1)], [Region(4096, 1), Region(8192, 1, "cuda:1")]
    missing = tmp_path / "missing"
    (tmp_path / "mlx5_0").touch()
    for environ in ({}, {"UCX_TLS": "tcp,cma"}, {"UCX_SHM_DEVICES": ""}):
        assert not refusal(environ, host, missing)
        assert not refusal(environ, device, tmp_path)
    assert "cuda:1" in refusal({}, device, missing)
    assert "UCX_SHM_DEVICES=memory" in refusal({"UCX_SHM_DEVICES": "memory"}, host, missing)


def test_a_home_without_safe_windows_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_SHM_DEVICES", "memory")
    memory = np.zeros(4096, np.uint8)
    backend = open_backend("owner", options={})
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    assert not backend.traits.lands
    with pytest.raises(BackendUnavailable, match=r"UCX_SHM_DEVICES=memory.*unset"):
        backend.window("p")
    backend.close()


def test_a_window_leaves_the_home_its_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls keep CMA: a window exports less than its backend does, over the same memory."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    memory = np.zeros(4096, np.uint8)
    backend = open_backend("owner", options={})
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    window = backend.window("p")
    assert len(window.metadata()) < len(backend.metadata())
    window.close()
    backend.close()
