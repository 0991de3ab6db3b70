"""Where this worker stands in its host, as Linux shows it in /sys: for `kvctl describe-topology`.

It tells what it finds. What cannot be read is left out: nothing depends on it, and no engine may fail for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvd.backends.cuda.driver import CudaError, pci_device
from kvd.backends.errors import BackendUnavailable
from kvd.backends.regions import parse_device
from kvd.geometry.model import Region
from kvd.shown import escaped, logger
from kvd.wire.locality import LONGEST_PATH, MOST_ADAPTERS, MOST_NODES, Locality, PciDevice

log = logger(__name__)

SYS = Path("/sys")


def locality(regions: Sequence[Region], sys: Path = SYS) -> Locality:
    """That of a worker whose KV memory is these regions."""
    cpus = os.sched_getaffinity(0)
    return Locality(
        cpus=ranges(cpus)[:256],
        numa=tuple(_nodes(cpus, sys))[:MOST_NODES],
        gpu=_gpu(regions[0].device, sys) if regions else None,
        adapters=tuple(_adapters(sys))[:MOST_ADAPTERS],
    )


def ranges(numbers: Iterable[int]) -> str:
    """As the kernel writes sets of CPUs: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _members(text: str) -> Iterator[int]:
    for run in text.strip().split(","):
        first, _, last = run.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


def _nodes(cpus: set[int], sys: Path) -> Iterator[int]:
    for node in sorted(_entries(sys / "devices/system/node"), key=lambda path: (len(path.name), path.name)):
        number = node.name.removeprefix("node")
        if number.isdecimal() and not cpus.isdisjoint(_members(_text(node / "cpulist"))):
            yield int(number)


def _gpu(device: str, sys: Path) -> PciDevice | None:
    kind, ordinal = parse_device(device)
    if kind != "cuda":
        return None
    try:
        name, address = pci_device(ordinal)
    except (BackendUnavailable, CudaError) as error:
        log.info("where this worker's GPU is in its host is not known: %s", error)
        return None
    return _device(sys / "bus/pci/devices" / address, name)


def _adapters(sys: Path) -> Iterator[PciDevice]:
    for kind in ("infiniband", "net"):
        links = (path / "device" for path in sorted(_entries(sys / "class" / kind)))
        found = [device for link in links if (device := _device(link, link.parent.name)) is not None]
        if found:
            yield from found
            return


def _device(link: Path, name: str) -> PciDevice | None:
    """The device that a link of /sys leads to; None where it is not on PCI, as the loopback."""
    try:
        parts = link.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return None
    bridge = next((at for at, part in enumerate(parts) if part.startswith("pci")), None)
    if bridge is None:
        return None
    # Below the device's own address may stand a bus of its own, as virtio's.
    path = [part for part in parts[bridge:] if ":" in part]
    numa = _text(Path(*parts[: bridge + len(path)]) / "numa_node").strip()
    return PciDevice(
        name=escaped(name)[:64],
        path="/".join(path)[:LONGEST_PATH],
        numa=int(numa) if numa.isdecimal() else -1,
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
