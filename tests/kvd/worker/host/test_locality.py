"""Where a worker stands in its host, of a /sys as a server with two sockets has it, and of this host's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.geometry.model import Region
from kvd.wire.locality import LONGEST_PATH, MOST_ADAPTERS, PciDevice
from kvd.worker.host import locality as module
from kvd.worker.host.locality import locality, ranges

HOST_MEMORY = (Region(0x1000, 0x1000),)
GPU_MEMORY = (Region(0x1000, 0x1000, "cuda:0"),)
SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"
GPU, NEAR, FAR = (
    f"{SWITCH}/0000:17:00.0/0000:18:00.0",
    f"{SWITCH}/0000:17:01.0/0000:19:00.0",
    "pci0000:97/0000:97:01.0/0000:98:00.0",
)


def device(sys: Path, path: str, numa: int) -> Path:
    found = sys / "devices" / path
    found.mkdir(parents=True)
    (found / "numa_node").write_text(f"{numa}\n")
    return found


def link(sys: Path, name: str, target: Path) -> None:
    place = sys / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of four CPUs each; this process may run on those of the first."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for node, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    link(tmp_path, "bus/pci/devices/0000:18:00.0", device(tmp_path, GPU, 0))
    link(tmp_path, "class/net/lo/none", tmp_path)
    return tmp_path


def test_a_gpu_and_rdma_adapters_are_told_with_their_ways_to_the_cpu(
    sys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "pci_device", lambda _: ("NVIDIA H100", "0000:18:00.0"))
    link(sys, "class/infiniband/mlx5_0/device", device(sys, NEAR, 0))
    link(sys, "class/infiniband/mlx5_1/device", device(sys, FAR, 1))
    found = locality(GPU_MEMORY, sys)
    assert (found.cpus, found.numa) == ("0-3", (0,))
    assert found.gpu == PciDevice(name="NVIDIA H100", path=GPU, numa=0)
    assert found.gpu.address == "0000:18:00.0"
    assert found.adapters == (
        PciDevice(name="mlx5_0", path=NEAR, numa=0),
        PciDevice(name="mlx5_1", path=FAR, numa=1),
    )


def test_without_rdma_network_cards_are_told_and_what_is_no_card_is_not(sys: Path) -> None:
    card = device(sys, FAR, -1)
    (card / "virtio0").mkdir()
    link(sys, "class/net/eth0/device", card / "virtio0")
    found = locality(HOST_MEMORY, sys)
    assert found.gpu is None
    assert found.adapters == (PciDevice(name="eth0", path=FAR, numa=-1),)


def test_where_nothing_can_be_read_there_is_nothing_and_no_error(tmp_path: Path) -> None:
    found = locality(GPU_MEMORY, tmp_path / "none")
    assert (found.numa, found.adapters) == ((), ())
    assert found.cpus == ranges(os.sched_getaffinity(0))


def test_however_many_adapters_there_are_a_message_takes_what_is_told(sys: Path) -> None:
    for number in range(MOST_ADAPTERS + 8):
        deep = "/".join(f"{number:04x}:{level:02x}:00.0" for level in range(24))
        link(sys, f"class/infiniband/mlx5_{number}/device", device(sys, f"pci0000:00/{deep}", 0))
    found = locality(HOST_MEMORY, sys)
    assert len(found.adapters) == MOST_ADAPTERS
    assert max(len(adapter.path) for adapter in found.adapters) == LONGEST_PATH


def test_this_hosts_own_is_told() -> None:
    found = locality(HOST_MEMORY)
    assert found.cpus
    assert all(adapter.path.startswith("pci") for adapter in found.adapters)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([5], "5"), ([0, 1, 2, 3, 8], "0-3,8"), ([9, 1], "1,9")]
)
def test_sets_of_cpus_are_written_as_the_kernel_does(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
