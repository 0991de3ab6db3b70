"""Which threads of this process count as those that move bytes for peers."""

from __future__ import annotations

import importlib.util
import threading

import numpy as np
import pytest

from kvd.backends.contract import serving_threads
from kvd.backends.registry import open_backend
from kvd.backends.started_threads import threads_started
from kvd.geometry.model import Region


def test_pythons_own_threads_do_not_count() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    started, threads = threads_started(thread.start)
    ends.set()
    thread.join()
    assert (started, threads) == (None, frozenset())


@pytest.mark.parametrize("kind", ["nixl", "mooncake", "auto", "direct"])
def test_a_transfer_engine_serves_peers_by_its_own_threads(kind: str) -> None:
    for module in {"nixl": ("nixl",), "mooncake": ("mooncake",), "auto": ("nixl",)}.get(kind, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    memory = np.zeros(1 << 16, np.uint8)
    backend = open_backend(kind, "w", {})
    try:
        backend.register([Region(memory.ctypes.data, memory.nbytes)])
        python = {thread.native_id for thread in threading.enumerate()}
        serving = serving_threads(backend)
        assert bool(serving) == (kind != "direct"), "with direct the reader's process copies"
        assert not serving & python
    finally:
        backend.close()
