"""When a path between GPUs is called slow, and when nothing can be said of it."""

import pytest

from kvd.topology.pace import BULK, Pace, slow_path

GPUS = ("cuda:0", "cuda:1")
FAST, SLOW = Pace(256 << 20, 0.002, 100), Pace(256 << 20, 0.5, 100)
CONNECTING = Pace(BULK, 0.115, 32)


def test_even_the_fastest_is_slow() -> None:
    found = slow_path([CONNECTING, SLOW], GPUS, "nixl")
    assert found is not None
    assert (found.code, found.severity) == ("SLOW_PATH", "warning")
    assert "came at 0.5 GB/s (256 MiB in 100 copies): nixl moves them through the host" in found.message
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in found.hint


def test_each_backend_has_its_cure() -> None:
    found = slow_path([SLOW, SLOW], GPUS, "mooncake")
    assert found is not None
    assert "protocol of the backend to nvlink" in found.hint
    other = slow_path([SLOW, SLOW], GPUS, "direct")
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
    assert slow_path(paces, devices, "nixl") is None
