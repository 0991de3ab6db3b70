"""This host: what the kernel lets workers do, what hardware there is, and a library that ends processes badly."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvctl.cli.numbers import size
from kvctl.doctor.checks import checked
from kvctl.views.doctor import Check
from kvd.backends.direct.permission import Rules, rules
from kvd.backends.registry import available

LEAST_SHARED = 1 << 30
"""Bytes of /dev/shm below which vLLM and UCX run into trouble."""
LEAST_FILES = 4096
"""Open files of a process: a large engine's sockets, mapped memory and connections."""
UNLIMITED = resource.RLIM_INFINITY
OFFLOADING = "--kv-offloading-size"
"""vLLM's flag that puts a connector in the place of whichever is configured."""
_LOCKED = "Max locked memory"

_host = partial(checked, "host")


def host_checks(
    workers: Sequence[int] = (), root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> Iterator[Check]:
    """The checks. ``workers`` are processes of workers, ``root`` is where /proc, /sys and /dev are."""
    ports = dict(_ports(root / "sys/class/infiniband"))
    yield _readers(rules(root / "proc/sys/kernel/yama/ptrace_scope", root / "proc/self/status"))
    yield _shared(root / "dev/shm")
    yield _files()
    yield from _fabric(ports)
    if ports:
        yield from _addresses(root / "sys/class/infiniband", ports)
        yield from _locked(root, workers)
        yield from _peer_memory(root)
    yield from _libnl(root, ports, environment)
    yield from _replaced(root / "proc")


def _readers(mine: Rules) -> Check:
    found = f"kernel.yama.ptrace_scope is {mine.scope}"
    if mine.scope < 2:
        return _host("ok", "PTRACE", f"{found}: workers of one user may share memory")
    return _host(
        "warning", "PTRACE",
        f"{found}: direct and UCX's CMA read another process's memory with CAP_SYS_PTRACE only, or never",
        "sysctl kernel.yama.ptrace_scope=1; direct maps KV that is backed by memfd whatever the scope",
    )  # fmt: skip


def _shared(place: Path) -> Check:
    try:
        room = os.statvfs(place)
    except OSError as error:
        return _host(
            "warning", "SHARED_MEMORY", f"{place}: {error.strerror}",
            "mount a tmpfs there: vLLM's workers and UCX share memory through it",
        )  # fmt: skip
    free = room.f_bavail * room.f_frsize
    if free < LEAST_SHARED:
        return _host(
            "warning", "SHARED_MEMORY", f"{size(free)} free in {place}",
            f"give it {size(LEAST_SHARED)} and more: mount -o remount,size=..., or --shm-size of the container",
        )  # fmt: skip
    return _host("ok", "SHARED_MEMORY", f"{size(free)} free in {place}")


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"a process may open {'any number of' if soft == UNLIMITED else soft} files"
    if soft == UNLIMITED or soft >= LEAST_FILES or hard == UNLIMITED or hard >= LEAST_FILES:
        return _host("ok", "FILES", found)
    return _host("warning", "FILES", found, f"raise LimitNOFILE or ulimit -n to {LEAST_FILES}")


def _ports(devices: Path) -> Iterator[tuple[str, str]]:
    """The ports of InfiniBand and RoCE adapters, and their states ("4: ACTIVE")."""
    for state in sorted(devices.glob("*/ports/*/state")):
        yield f"{state.parts[-4]}/{state.parts[-2]}", state.read_text().strip()


def _fabric(ports: Mapping[str, str]) -> Iterator[Check]:
    if not ports:
        yield _host("ok", "RDMA", "no RDMA adapter: other hosts are reached over TCP")
        return
    active = [name for name, state in ports.items() if "ACTIVE" in state]
    for name, state in ports.items():
        if name not in active:
            yield _host(
                "warning", "RDMA_PORT", f"{name} is {state}",
                "is it cabled, and does a subnet manager run? see ibstat; UCX_NET_DEVICES names those to use",
            )  # fmt: skip
    if active:
        yield _host("ok", "RDMA", f"active: {', '.join(active)}")


def _addresses(devices: Path, ports: Mapping[str, str]) -> Iterator[Check]:
    """RoCE goes by IP: a port on Ethernet has a GID of version 2 for each address, or reaches nobody."""
    for name, state in ports.items():
        adapter, _, number = name.partition("/")
        port = devices / adapter / "ports" / number
        if "ACTIVE" not in state or _line(port / "link_layer") != "Ethernet":
            continue
        kinds = {kind.name: _line(kind) for kind in (port / "gid_attrs/types").glob("*")}
        usable = [
            at for at, kind in kinds.items() if kind == "RoCE v2" and _line(port / "gids" / at).strip("0:")
        ]
        if not usable:
            yield _host(
                "warning", "GID", f"{name} is active and has no GID of RoCE v2 among {len(kinds)}",
                "give its network interface an address (ip address), then see show_gids; UCX_IB_GID_INDEX names the one"
                " to use",
            )  # fmt: skip


def _line(file: Path) -> str:
    """What a file of the kernel's says; empty where it does not: reading the type of a GID that is not set fails."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _locked(root: Path, workers: Sequence[int]) -> Iterator[Check]:
    """KV memory is locked to be registered with an adapter."""
    limits = {
        f"the worker with pid {pid}": limit for pid in workers if (limit := _limit(root, pid)) is not None
    }
    limits = limits or {"a process of this shell": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]}
    for who, limit in limits.items():
        if limit != UNLIMITED:
            yield _host(
                "warning", "MEMLOCK",
                f"{who} may lock {size(limit)}, and registering KV memory with an adapter locks all of it",
                "give the engines' units LimitMEMLOCK=infinity (docker: --ulimit memlock=-1)",
            )  # fmt: skip


def _limit(root: Path, pid: int) -> int | None:
    """Bytes that a process may lock; None where it cannot be known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc" / str(pid) / "limits").read_text().splitlines():
            if line.startswith(_LOCKED):
                soft = line.removeprefix(_LOCKED).split()[0]
                return UNLIMITED if soft == "unlimited" else int(soft)
    return None


def _peer_memory(root: Path) -> Iterator[Check]:
    """Adapters reach GPU memory through a module of NVIDIA's, or through dma-buf where driver and adapter know it."""
    gpus = [*(root / "proc/driver/nvidia/gpus").glob("*")]
    modules = root / "proc/modules"
    if gpus and "nvidia_peermem " not in (modules.read_text() if modules.exists() else ""):
        yield _host(
            "warning", "PEER_MEMORY",
            f"{len(gpus)} GPUs and RDMA adapters, and the module nvidia_peermem is not loaded",
            "modprobe nvidia-peermem, unless kernel and adapter do dma-buf; see the transport in kvctl benchmark",
        )  # fmt: skip


def _libnl(root: Path, ports: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[Check]:
    """NIXL's UCX brings a libnl, the distribution's libibverbs another; a process with both may end badly."""
    installed = not available()["nixl"].startswith("not installed")
    system = any(
        next((root / place).glob("**/libibverbs.so.1"), None) is not None
        for place in ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64")
    )
    excluded = environment.get("UCX_MODULES", "").startswith("^") and "ib" in environment["UCX_MODULES"]
    if installed and system and not ports and not excluded:
        yield _host(
            "warning", "TWO_LIBNL",
            "libibverbs of the system and NIXL's UCX load a libnl each: workers may end with SIGSEGV",
            "there is no RDMA adapter to lose: set UCX_MODULES=^ib for the engines",
        )  # fmt: skip


def _replaced(processes: Path) -> Iterator[Check]:
    """Such an engine starts, says nothing, and no kvd hears of it: its command line alone shows it."""
    for file in sorted(processes.glob("[0-9]*/cmdline")):
        words: list[str] = []
        with contextlib.suppress(OSError):  # it ended, or is another user's
            words = file.read_text(errors="replace").split("\0")
        flag = next((word for word in words if word.startswith(OFFLOADING)), None)
        if flag and any('"KvdConnector"' in word for word in words):
            yield _host(
                "warning", "CONNECTOR_REPLACED",
                f"the engine with pid {file.parent.name} is given KvdConnector and {OFFLOADING}, with which vLLM"
                " takes a connector of its own in its place: it hands nothing over",
                f"leave {OFFLOADING} out, and name KvdConnector and OffloadingConnector in a MultiConnector:"
                " docs/switching.md",
            )  # fmt: skip
