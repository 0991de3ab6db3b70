"""How near GPUs and network adapters are to each other, in the words of `nvidia-smi topo -m`."""

from __future__ import annotations

import pytest

from kvctl.views.drawing import as_text
from kvctl.views.topology.localities import localities_screen, worker_localities
from kvctl.views.topology.nearness import between, to_adapter
from kvd.geometry.rank import Rank
from kvd.wire.locality import Locality, PciDevice
from kvd.wire.query import WorkerRow

SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"


def pci(path: str, numa: int = 0, name: str = "mlx5_0") -> PciDevice:
    return PciDevice(name=name, path=path, numa=numa)


GPU = pci(f"{SWITCH}/0000:17:00.0/0000:18:00.0", name="NVIDIA H100")


@pytest.mark.parametrize(
    ("other", "nearness"),
    [
        (GPU, "X"),
        (pci(f"{SWITCH}/0000:17:01.0/0000:19:00.0"), "PIX"),
        (pci(f"{SWITCH}/0000:17:01.0/0000:19:00.0/0000:1a:00.0/0000:1b:00.0"), "PXB"),
        (pci("pci0000:15/0000:15:02.0/0000:1f:00.0"), "PHB"),
        (pci("pci0000:26/0000:26:01.0/0000:27:00.0"), "NODE"),
        (pci("pci0000:97/0000:97:01.0/0000:98:00.0", numa=1), "SYS"),
    ],
)
def test_two_devices_are_as_near_as_their_ways_to_the_cpu_are_one(other: PciDevice, nearness: str) -> None:
    assert between(GPU, other) == between(other, GPU) == nearness


@pytest.mark.parametrize(("numa", "nearness"), [(0, "NODE"), (1, "SYS"), (-1, "NODE")])
def test_of_the_hosts_memory_the_numa_node_decides(numa: int, nearness: str) -> None:
    assert to_adapter(Locality(cpus="0-3", numa=(0,)), pci("pci0000:26/0000:27:00.0", numa)) == nearness


def row(rank: int, stands: Locality | None, engine_id: str = "decode-0", state: str = "alive") -> WorkerRow:
    return WorkerRow(
        kind="worker",
        engine_id=engine_id,
        rank=Rank(rank),
        pid=1,
        incarnation="i",
        state=state,
        registered=0.0,
        heartbeat_age=0.0,
        locality=stands,
    )


ADAPTERS = (
    pci(f"{SWITCH}/0000:17:01.0/0000:19:00.0", name="mlx5_0"),
    pci("pci0000:97/0000:97:01.0/0000:98:00.0", 1, name="mlx5_1"),
)
ROWS = (
    row(0, Locality(cpus="0-47", numa=(0,), gpu=GPU, adapters=ADAPTERS)),
    row(
        1,
        Locality(
            cpus="48-95",
            numa=(1,),
            gpu=pci("pci0000:97/0000:97:02.0/0000:9a:00.0", 1, name="NVIDIA H100"),
            adapters=ADAPTERS,
        ),
    ),
    row(2, None),
    row(3, Locality(cpus="0"), state="gone"),
    row(0, Locality(cpus="0"), engine_id="another"),
)


def test_each_worker_that_told_it_is_shown_with_its_nearest_adapter() -> None:
    found = worker_localities(ROWS, {"decode-0"})
    assert [worker.worker for worker in found] == ["decode-0/tp0", "decode-0/tp1"]
    assert found[0].adapters == {"mlx5_0": "PIX", "mlx5_1": "SYS"}
    assert found[0].workers == {"decode-0/tp1": "SYS"}
    assert [(worker.pci, worker.numa) for worker in found] == [("0000:18:00.0", (0,)), ("0000:9a:00.0", (1,))]
    shown = as_text(localities_screen(found, wide=False), 80).plain
    assert "decode-0/tp0  NVIDIA H100  0000:18:00.0  0     0-47   mlx5_0 (PIX)" in shown
    assert "decode-0/tp1  NVIDIA H100  0000:9a:00.0  1     48-95  mlx5_1 (PHB)" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_wide_has_the_whole_matrix() -> None:
    shown = as_text(localities_screen(worker_localities(ROWS, {"decode-0"}), wide=True), 140).plain
    lines = [line.split() for line in shown.splitlines()]
    assert ["W0", "W1", "mlx5_0", "mlx5_1", "WORKER"] in lines
    assert ["W0", "X", "SYS", "PIX", "SYS", "decode-0/tp0"] in lines
    assert ["W1", "SYS", "X", "SYS", "PHB", "decode-0/tp1"] in lines


def test_workers_without_gpus_are_shown_where_all_is_asked_for() -> None:
    found = worker_localities([row(0, Locality(cpus="0-3", numa=(0,)))], {"decode-0"})
    assert localities_screen(found, wide=False) == []
    assert "decode-0/tp0" in as_text(localities_screen(found, wide=True), 80).plain
