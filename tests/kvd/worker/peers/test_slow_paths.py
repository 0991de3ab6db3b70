"""The warning of a slow path: once for each generation of a peer, for GPU memory only."""

import pytest

from kvd.wire.transfer import TransferRecord
from kvd.worker.peers.slow_paths import Paths


def record(
    *, seconds: float = 0.5, generation: str = "g", state: str = "done", mode: str = "pull"
) -> TransferRecord:
    return TransferRecord(
        transfer_id="t",
        request_id="r",
        local_engine="d",
        local_rank="tp0",
        remote_engine="p",
        remote_generation=generation,
        remote_request_id="r",
        backend="nixl",
        mode=mode,  # type: ignore[arg-type]
        state=state,  # type: ignore[arg-type]
        bytes=256 << 20,
        coalesced_descriptors=64,
        stages={"queued": 1.0, "post": seconds / 2, "wire": seconds / 2},
    )


def test_told_once_for_each_generation(caplog: pytest.LogCaptureFixture) -> None:
    paths = Paths("cuda:0")
    for generation in ("g", "g", "g", "g", "h", "h"):
        paths.note(record(generation=generation))
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("SLOW_PATH: KV of p: between GPUs the fastest of 2 transfers came at 0.5 GB/s")


def test_one_fast_transfer_shows_that_the_path_is_not_slow(caplog: pytest.LogCaptureFixture) -> None:
    paths = Paths("cuda:0")
    for seconds in (0.5, 0.001, 0.5, 0.5):
        paths.note(record(seconds=seconds))
    assert not caplog.records


def test_neither_misses_nor_pushes_nor_host_memory_tell(caplog: pytest.LogCaptureFixture) -> None:
    gpu, host = Paths("cuda:0"), Paths("cpu")
    for _ in range(3):
        gpu.note(record(state="miss"))
        gpu.note(record(mode="push"))
        host.note(record())
    assert not caplog.records
