"""What the host says of itself, read from files of a made-up one."""

from __future__ import annotations

from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from kvctl.doctor import host_checks as of_host
from kvctl.doctor.host_checks import host_checks
from kvctl.views.doctor import Check


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host without Yama, RDMA or libibverbs."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000000000000\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def checks(root: Path, workers: tuple[int, ...] = (), **environment: str) -> dict[str, Check]:
    return {check.code: check for check in host_checks(workers, root, environment)}


def adapter(root: Path, name: str, state: str) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")


def test_a_plain_host_is_well(root: Path) -> None:
    assert {check.state for check in checks(root).values()} == {"ok"}
    assert "TCP" in checks(root)["RDMA"].found


@pytest.mark.parametrize(("scope", "state"), [(0, "ok"), (1, "ok"), (2, "warning"), (3, "warning")])
def test_a_scope_of_ptrace_that_shuts_readers_out_is_told(root: Path, scope: int, state: str) -> None:
    yama = root / "proc/sys/kernel/yama"
    yama.mkdir(parents=True)
    (yama / "ptrace_scope").write_text(f"{scope}\n")
    found = checks(root)["PTRACE"]
    assert (found.state, f"ptrace_scope is {scope}" in found.found) == (state, True)


def test_shared_memory_that_is_not_there_or_full_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_host, "LEAST_SHARED", 1 << 60)
    full = checks(root)["SHARED_MEMORY"]
    assert (full.state, "--shm-size" in full.hint) == ("warning", True)
    (root / "dev/shm").rmdir()
    assert checks(root)["SHARED_MEMORY"].state == "warning"


def test_a_port_of_roce_without_an_address_is_told(root: Path) -> None:
    adapter(root, "mlx5_0", "4: ACTIVE")
    assert "GID" not in checks(root), "InfiniBand"
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    (port / "link_layer").write_text("Ethernet\n")
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    for at, (gid, kind) in enumerate((("fe80::1", "IB/RoCE v1"), ("0000:0000:0000:0000", "RoCE v2"))):
        (port / "gids" / str(at)).write_text(f"{gid}\n")
        (port / "gid_attrs/types" / str(at)).write_text(f"{kind}\n")
    found = checks(root)["GID"]
    assert (found.state, found.found) == ("warning", "mlx5_0/1 is active and has no GID of RoCE v2 among 2")
    (port / "gids/1").write_text("0000:0000:0000:0000:0000:ffff:0a00:0007\n")
    assert "GID" not in checks(root)


def test_ports_are_told_by_their_state(root: Path) -> None:
    adapter(root, "mlx5_0", "4: ACTIVE")
    adapter(root, "mlx5_1", "1: DOWN")
    found = checks(root)
    assert found["RDMA"].found == "active: mlx5_0/1"
    assert (found["RDMA_PORT"].state, "mlx5_1/1 is 1: DOWN" in found["RDMA_PORT"].found) == ("warning", True)


@pytest.mark.parametrize(("limit", "told"), [(65536, True), (RLIM_INFINITY, False)])
def test_locked_memory_counts_where_there_is_an_adapter(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: int, told: bool
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _which: (limit, limit))
    assert "MEMLOCK" not in checks(root)
    adapter(root, "mlx5_0", "4: ACTIVE")
    assert ("MEMLOCK" in checks(root)) is told


@pytest.mark.parametrize(("soft", "told"), [("8388608", True), ("unlimited", False)])
def test_what_counts_is_what_the_workers_may_lock(root: Path, soft: str, told: bool) -> None:
    adapter(root, "mlx5_0", "4: ACTIVE")
    (root / "proc/77").mkdir()
    (root / "proc/77/limits").write_text(f"Max locked memory         {soft:<21}unlimited            bytes\n")
    found = checks(root, (77, 78)).get("MEMLOCK")
    assert (found is not None) is told
    assert found is None or "the worker with pid 77 may lock 8.00 MiB" in found.found


def test_gpus_and_adapters_without_the_module_between_them_are_told(root: Path) -> None:
    (root / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert "PEER_MEMORY" not in checks(root), "nothing registers GPU memory with an adapter"
    adapter(root, "mlx5_0", "4: ACTIVE")
    assert "modprobe nvidia-peermem" in checks(root)["PEER_MEMORY"].hint
    (root / "proc/modules").write_text("nvidia_peermem 16384 0 - Live 0x0\n")
    assert "PEER_MEMORY" not in checks(root)


@pytest.mark.parametrize(
    ("with_adapter", "modules", "told"), [(False, "", True), (False, "^ib", False), (True, "", False)]
)
def test_two_copies_of_libnl_are_told_unless_ucx_leaves_its_module_out(
    root: Path, monkeypatch: pytest.MonkeyPatch, with_adapter: bool, modules: str, told: bool
) -> None:
    monkeypatch.setattr(of_host, "available", lambda: {"nixl": "1.5.1"})
    libraries = root / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    (libraries / "libibverbs.so.1").touch()
    if with_adapter:
        adapter(root, "mlx5_0", "4: ACTIVE")
    assert ("TWO_LIBNL" in checks(root, UCX_MODULES=modules)) is told


@pytest.mark.parametrize("flag", [("--kv-offloading-size", "4"), ("--kv-offloading-size=4",)])
def test_an_engine_whose_connector_vllm_replaces_is_told(root: Path, flag: tuple[str, ...]) -> None:
    config = '{"kv_connector": "KvdConnector", "kv_connector_module_path": "kvd.vllm"}'
    given = ("vllm", "serve", "m", "--kv-transfer-config", config)
    for pid, words in {7: given, 8: (*given, *flag), 9: ("vllm", "serve", "m", *flag)}.items():
        (root / "proc" / str(pid)).mkdir()
        (root / "proc" / str(pid) / "cmdline").write_text("\0".join(words) + "\0")
    (root / "proc/10").mkdir()
    (root / "proc/10/cmdline").symlink_to(root / "gone")
    found = checks(root)["CONNECTOR_REPLACED"]
    assert found.state == "warning"
    assert "pid 8 is given KvdConnector" in found.found
    assert "MultiConnector" in found.hint


def test_few_open_files_are_told_with_how_many_are_wanted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    found = checks(root)["FILES"]
    assert (found.state, found.found) == ("warning", "a process may open 256 files")
    assert "4096" in found.hint
