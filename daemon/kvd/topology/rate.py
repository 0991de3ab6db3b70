"""Whether bytes between memories of GPUs come as fast as a path meant for them lets them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.topology.findings import Finding

LEAST_RATE = 5e9
"""Bytes a second. Paths meant for GPUs reach 20 times that; through the host and tcp it is 0.5 to 2e9."""
BULK = 32 << 20
"""Bytes of a transfer from which its rate says something of the path."""
PIECE = 64 << 10
"""Bytes of a copy below which the number of copies may be what takes the time."""
SEVERAL = 2
"""The first transfer of a pair pays for their connection, about 0.1 s."""
PROBED_BYTES = 4 << 20
"""Bytes of a probe's read from which the difference to one of next to nothing is more than noise: 1.7 ms at
`PROBED_RATE`, 0.1 ms on a path meant for GPUs."""
PROBED_RATE = LEAST_RATE / 2
"""A few MiB are a small sample: only what is far too slow is called so."""
ROUNDS = 3
"""Reads of each kind of which the fastest counts."""

_OTHER = "see the backend's page in docs/backends/"


@dataclass(frozen=True, slots=True)
class Mover:
    """What moves bytes between GPUs. ``through_host``: by way of the host, by design.

    ``cure`` says what to do where it is slow; empty where a page does.
    """

    name: str
    through_host: bool = False
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """One finished transfer: bytes, seconds from the first post to the last completion, separate copies."""

    bytes: int
    seconds: float
    copies: int

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds > 0 else float("inf")

    @property
    def tells(self) -> bool:
        """Whether its rate is that of the path: many bytes in copies that are not small."""
        return self.bytes >= BULK and self.bytes >= PIECE * self.copies


@dataclass(frozen=True, slots=True)
class Probed:
    """Reads of the same places, in as many ``copies``, with all bytes of them (``full``) and with next to none.

    Seconds that each took. What is there for each copy and each post is in both, so the difference is what the
    ``bytes`` took by which they differ.
    """

    bytes: int
    copies: int
    full: tuple[float, ...]
    bare: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Bytes a second, of the fastest of each kind."""
        seconds = min(self.full) - min(self.bare)
        return self.bytes / seconds if seconds > 0 else float("inf")

    @property
    def tells(self) -> bool:
        """Whether that is the rate of the path."""
        enough = len(self.full) >= ROUNDS and len(self.bare) >= ROUNDS
        return enough and self.bytes >= PROBED_BYTES // 2 and self.bytes >= PIECE // 2 * self.copies


def slow_probe(probes: Iterable[Probed], devices: Sequence[str], mover: Mover) -> Finding | None:
    """What to know of the slowest of these paths, if it is slow beyond doubt; otherwise as `slow_path`."""
    telling = [probe for probe in probes if probe.tells]
    if not telling or not _between_gpus(devices, mover):
        return None
    worst = min(telling, key=lambda probe: probe.rate)
    if worst.rate >= PROBED_RATE:
        return None
    size = f"{worst.bytes >> 20} MiB in {worst.copies} copies"
    return _through_the_host(f"a probe of {size} came at {worst.rate / 1e9:.1f} GB/s", mover)


def slow_path(paces: Iterable[Pace], devices: Sequence[str], mover: Mover) -> Finding | None:
    """What to know of a path by which these transfers came, if even the fastest of them was slow.

    ``devices`` are those of both sides' memory (``cuda:0``). None where one is the host's, or too few transfers tell.
    """
    telling = [pace for pace in paces if pace.tells]
    if len(telling) < SEVERAL or not _between_gpus(devices, mover):
        return None
    best = max(telling, key=lambda pace: pace.rate)
    if best.rate >= LEAST_RATE:
        return None
    size = f"{best.bytes >> 20} MiB in {best.copies} copies"
    seen = f"the fastest of {len(telling)} transfers came at {best.rate / 1e9:.1f} GB/s ({size})"
    return _through_the_host(seen, mover)


def _between_gpus(devices: Sequence[str], mover: Mover) -> bool:
    """Whether bytes are meant to go from GPU to GPU."""
    return not mover.through_host and all(device.startswith("cuda") for device in devices)


def _through_the_host(seen: str, mover: Mover) -> Finding:
    message = f"between GPUs {seen}: {mover.name} moves them through the host"
    return Finding("SLOW_PATH", "warning", message, mover.cure or _OTHER)
