"""NIXL between two real processes: every byte, every way to give up, and a clean stdout."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.backends.errors import RegistrationError
from kvd.backends.nixl.backend import open_backend
from kvd.backends.nixl.lane import NixlLane
from kvd.backends.nixl.library import prefer_cuda_ipc, prepare_environment, software_only
from kvd.geometry.model import Region

pytest.importorskip("nixl", exc_type=ImportError)

SUPPORT = Path(__file__).parents[3] / "support"
BYTES = 32 << 20


def run(script: str, *arguments: str, transports: str | None) -> dict[str, Any]:
    """Run a support script; it must end with 0 and print one line and nothing else."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    if transports:
        environ["UCX_TLS"] = transports
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    found: dict[str, Any] = json.loads(lines[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("transports", [None, "tcp,self"], ids=["shared-memory", "tcp"])
def test_two_processes(transports: str | None) -> None:
    found = run("backend_reader.py", "nixl", transports=transports)
    assert found["whole"] == ["done", True]
    assert found["fragments"] == ["done", True]
    assert found["picks"] == ["done", True] * 6
    assert found["write"] == "done"
    assert found["written"] is True
    # Over tcp a post of thousands of pieces may last until all of them are there, so it may be either.
    assert found["copying"] == ["kvd-copy-one_0"] or (transports and found["copying"] == [])
    for side in ("unregistered_remote", "unregistered_local"):
        kind, message, hint = found[side]
        assert kind == "TransferRefused"
        assert "NIXL_ERR_NOT_FOUND" in message
        assert "registered" in hint
    state, reason = found["killed"]
    assert state == "failed"
    assert "peer" in reason
    assert "NIXL_ERR" in reason
    assert found["close_s"] < 1
    assert found["agents"] <= 2  # the backend's and the second lane's


@pytest.mark.slow
@pytest.mark.parametrize("posted", ["descriptors", "picks"])
def test_nothing_lands_after_close_and_the_peer_survives(posted: str) -> None:
    found = run("backend_give_up.py", "nixl", "close", str(BYTES), posted, transports="tcp,self")
    assert found["before"] == "pending"
    assert found["after"] == "failed"
    assert "closed" in found["reason"]
    assert found["landed"] == 0
    assert found["peer"] is None
    assert found["other"] == "done"
    assert found["remade"] == "done"
    assert found["close_s"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("posted", ["descriptors", "picks"])
def test_everything_lands_without_close(posted: str) -> None:
    """What the test above guards against does happen."""
    found = run("backend_give_up.py", "nixl", "nothing", str(BYTES), posted, transports="tcp,self")
    assert found["before"] == "pending"
    assert found["landed"] == BYTES


@pytest.mark.slow
@pytest.mark.parametrize("posted", ["descriptors", "picks"])
def test_destroying_keeps_our_memory_safe(posted: str) -> None:
    """The peer may die of it (docs/backends/nixl.md), which is why lanes are parked; our memory is safe either way."""
    assert (
        run("backend_give_up.py", "nixl", "destroy", str(BYTES), posted, transports="tcp,self")["landed"] == 0
    )


def test_close_says_so_when_the_agent_lives_on() -> None:
    memory = np.zeros(4096, np.uint8)
    backend = open_backend("holder", options={"copy_threads": 1})
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    lane = backend.lane("held")
    assert isinstance(lane, NixlLane)
    assert lane._agent is not None
    held = lane._agent._nixl.agent
    with pytest.raises(Exception, match="still referred to"):
        lane.close()
    del held
    lane.close()
    backend.close()


def test_an_idle_home_takes_no_processor() -> None:
    def used() -> dict[str, int]:
        tasks = Path("/proc/self/task").iterdir()
        return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}

    others = used().keys()
    memory = np.zeros(4096, np.uint8)
    backend = open_backend("idle", options={})
    backend.register([Region(int(memory.ctypes.data), memory.nbytes, "cpu")])
    began = used()
    assert began.keys() - others, "a thread of NIXL's answers peers"
    threading.Event().wait(1.0)
    shares = [(now - began[task]) / 1e9 for task, now in used().items() if task in began.keys() - others]
    backend.close()
    assert max(shares) < 0.05  # a thread that spins has what the machine can give


def test_environment(tmp_path: Path) -> None:
    bare: dict[str, str] = {}
    prepare_environment(bare, tmp_path / "missing")
    assert bare == {"UCX_MODULES": "^ib", "UCX_LOG_FILE": "stderr"}
    (tmp_path / "mlx5_0").touch()
    cases = {
        "rc,cuda": "rc,cuda,tcp",
        "tcp,self": "tcp,self",
        "all": "all",
        "^tcp": "all",
        "^cma,tcp": "^cma",
    }
    for given, kept in cases.items():
        environ = {"UCX_TLS": given, "UCX_LOG_FILE": "f"}
        prepare_environment(environ, tmp_path)
        assert environ == {"UCX_TLS": kept, "UCX_LOG_FILE": "f"}


def test_reads_of_gpu_memory_go_by_cuda_ipc_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    (gpu := tmp_path / "nvidiactl").touch()
    for there, given, kept in (
        (tmp_path / "missing", {}, {}),
        (gpu, {}, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}),
        (gpu, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "off"}, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "off"}),
    ):
        environ = dict(given)
        prefer_cuda_ipc(environ, there)
        assert environ == kept


def test_lanes_over_device_memory_are_not_parked() -> None:
    """A device goes on copying by itself into the memory of a lane that nobody calls any more."""
    backend = open_backend("worker", options={"abandon": "park"})
    try:
        with pytest.raises(RegistrationError, match="abandon is park and memory is on cuda:1"):
            backend.register([Region(1 << 40, 4096, "cuda:1")])
    finally:
        backend.close()


def test_software_only(tmp_path: Path) -> None:
    host, device = [Region(4096, 1)], [Region(4096, 1), Region(8192, 1, "cuda:1")]
    missing = tmp_path / "missing"
    (tmp_path / "mlx5_0").touch()
    assert software_only({}, host, missing)
    assert software_only({"UCX_TLS": "tcp,self"}, host, tmp_path)
    assert not software_only({}, host, tmp_path)
    assert not software_only({"UCX_TLS": "rc,tcp"}, host, tmp_path)
    assert not software_only({}, device, missing)


def test_settings_refuse_what_they_do_not_know() -> None:
    with pytest.raises(Exception, match="abandon is 'maybe'"):
        open_backend("x", options={"abandon": "maybe"})
