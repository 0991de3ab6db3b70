"""Takes a window away from a writer in the middle of a write; prints one JSON line: what landed afterwards.

Arguments: the backend; what happens (``close``: the writer is stopped, the window closed, the writer goes on;
``nothing``: the same without closing; ``kill``: the writer is killed, then the window closed); the size of the write.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvd.backends.contract import Window, WindowBackend
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from tests.support.halting import go_on, halt

WRITER = Path(__file__).with_name("backend_writer.py")
TRIES = 10
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Writer:
    def __init__(self, kind: str, size: int, buffer: Bytes) -> None:
        self.buffer = buffer
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), kind, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, window: Window, size: int) -> None:
        """Order a write; returns once it is posted."""
        assert self.process.stdin is not None
        order = {"metadata": window.metadata().hex(), "address": self.buffer.ctypes.data, "size": size}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        assert self.answer() == {"posted": True}

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def midway(writer: Writer, window: Window, size: int) -> None:
    """Stop the writer in the middle of a write: something has landed, and at least a quarter has not."""
    samples = writer.buffer[:: 64 << 10]
    for _ in range(TRIES):
        writer.buffer[:] = 0
        writer.write(window, size)
        while not samples.any():
            window.progress()
        halt(writer.process.pid)
        still, before = int(np.count_nonzero(samples)), -1
        while still != before:  # what the kernel had already sent
            window.progress()
            time.sleep(0.05)
            still, before = int(np.count_nonzero(samples)), still
        if still < 0.75 * len(samples):
            return
        go_on(writer.process.pid)
        writer.answer()
    raise SystemExit(f"a write of {size} bytes was over before it could be stopped, {TRIES} times")


def main() -> None:
    kind, how, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    buffer: Bytes = np.zeros(size, np.uint8)
    backend = open_backend(kind, "landed", {})
    assert isinstance(backend, WindowBackend)
    backend.register([Region(buffer.ctypes.data, size)])
    window = backend.window("writer")
    writer = Writer(kind, size, buffer)
    result: dict[str, object] = {}
    try:
        midway(writer, window, size)
        if how == "kill":
            writer.process.kill()
            writer.process.wait()
        started = time.monotonic()
        if how != "nothing":
            window.close()
            window.close()
        result["close_s"] = time.monotonic() - started
        buffer[:] = 0
        if how != "kill":
            go_on(writer.process.pid)
            result |= writer.answer()
            result["landed"] = int(np.count_nonzero(buffer))
            buffer[:] = 0
            again = backend.window("again")
            writer.write(again, 4096)
            result["again"] = writer.answer()["state"]
            result["again_landed"] = int(np.count_nonzero(buffer))
            assert writer.process.stdin is not None
            writer.process.stdin.close()
            result["writer"] = writer.process.wait(20)
        else:
            time.sleep(0.5)  # there is nothing left that could tell when it would have landed
            result["landed"] = int(np.count_nonzero(buffer))
    finally:
        writer.process.kill()
        writer.process.wait()
    backend.close()
    backend.close()
    json.dump(result, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
