"""When a path between GPUs is called slow, and when nothing can be said of it."""

import pytest

from kvd.backends.registry import mover
from kvd.topology.rate import BULK, Pace, Probed, slow_path, slow_probe

GPUS = ("cuda:0", "cuda:1")
FAST, SLOW = Pace(256 << 20, 0.002, 100), Pace(256 << 20, 0.5, 100)
CONNECTING = Pace(BULK, 0.115, 32)


def test_even_the_fastest_is_slow() -> None:
    found = slow_path([CONNECTING, SLOW], GPUS, mover("nixl"))
    assert found is not None
    assert (found.code, found.severity) == ("SLOW_PATH", "warning")
    assert "came at 0.5 GB/s (256 MiB in 100 copies): nixl moves them through the host" in found.message
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in found.hint


def test_each_backend_has_its_cure() -> None:
    found = slow_path([SLOW, SLOW], GPUS, mover("mooncake"))
    assert found is not None
    assert "protocol of the backend to nvlink" in found.hint
    other = slow_path([SLOW, SLOW], GPUS, mover("direct"))
    assert other is not None
    assert "docs/backends" in other.hint


@pytest.mark.parametrize(
    ("paces", "devices"),
    [
        ([CONNECTING, FAST], GPUS),  # the first one paid for the connection
        ([SLOW], GPUS),  # it may be the first
        ([SLOW, SLOW], ("cpu", "cuda:0")),
        ([SLOW, SLOW], ("cpu", "cpu")),
        ([Pace(BULK - 1, 1.0, 1)] * 3, GPUS),  # too little to tell
        ([Pace(BULK, 1.0, BULK // 4096)] * 3, GPUS),  # small copies: their number takes the time
        ([Pace(BULK, 0.0, 1)] * 3, GPUS),
    ],
)
def test_nothing_is_said(paces: list[Pace], devices: tuple[str, str]) -> None:
    assert slow_path(paces, devices, mover("nixl")) is None


def test_bytes_that_are_staged_go_through_the_host_by_design() -> None:
    assert slow_path([SLOW, SLOW], GPUS, mover("staged")) is None
    assert slow_probe([probed(1.0, 0.001)], GPUS, mover("staged")) is None


def probed(full: float, bare: float, *, mib: int = 4, copies: int = 64, rounds: int = 3) -> Probed:
    return Probed(
        mib << 20, copies, (full + 0.01, full, full + 0.02)[:rounds], (bare + 0.01, bare, bare)[:rounds]
    )


def test_a_probe_far_below_any_path_for_gpus_is_slow() -> None:
    found = slow_probe([probed(0.0030, 0.0029), probed(0.0050, 0.0004)], GPUS, mover("nixl"))
    assert found is not None
    assert (found.code, found.severity) == ("SLOW_PATH", "warning")
    assert "a probe of 4 MiB in 64 copies came at 0.9 GB/s: nixl moves them through the host" in found.message
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in found.hint


@pytest.mark.parametrize(
    ("probe", "devices"),
    [
        (probed(0.0006, 0.0004), GPUS),
        (probed(0.0500, 0.0499), GPUS),  # what takes the time is not the bytes
        (probed(0.0004, 0.0005), GPUS),
        (probed(0.0016, 0.0004), GPUS),  # 3.5 GB/s: of so little it may be anything
        (probed(0.0050, 0.0004, rounds=2), GPUS),
        (probed(0.0050, 0.0004, mib=1), GPUS),
        (probed(0.0050, 0.0004, copies=1024), GPUS),
        (probed(0.0050, 0.0004), ("cuda:0", "cpu")),
    ],
)
def test_a_probe_that_leaves_doubt_says_nothing(probe: Probed, devices: tuple[str, ...]) -> None:
    assert slow_probe([probe], devices, mover("nixl")) is None
