"""Takes NIXL windows away from real writers; prints one JSON line: for each case what landed, and who survived.

Arguments: the size of the memory, the pieces that a write has, and cases, which are run in order with two writers that
live on from case to case. A case that ends in ``:number`` posts a selection of a grid. Cases:

``close``, ``keep``: a writer is stopped in the middle of a write, the window closed or kept, the memory zeroed, the
writer continued. ``unshielded``: as ``close``, with a window whose agent has all of UCX's transports.
``kill``, ``kill-keep``: the same with a writer that is killed.
``abandon``: the writer closes its lane in the middle of a write, and then the window is served.
``crowd``: one of three windows is closed again and again while it is written, by a writer that nobody stops.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvd.backends.nixl import backend as nixl
from kvd.backends.nixl.window import SHIELD, NixlWindow
from kvd.geometry.model import Region
from tests.support.halting import halt

WRITER = Path(__file__).with_name("nixl_writer.py")
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Found = dict[str, Any]


class Writer:
    """A writing process and what it says."""

    def __init__(self, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._line = b""
        assert self.answer() == "ready"

    def tell(self, **order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        """What it said since, or None."""
        assert self.process.stdout is not None
        self._line += self.process.stdout.readline() or b""
        if self._line.endswith(b"\n"):
            line, self._line = self._line, b""
            return json.loads(line)
        return None if self.process.poll() is None else {"state": "died", "status": self.process.returncode}

    def answer(self, *served: NixlWindow, seconds: float = 40) -> Any:
        """What it says next, with windows being served meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for window in served:
                window.progress()
            if (said := self.heard()) is not None:
                return said
            time.sleep(1e-4)
        return {"state": "silent"}

    def add(self, peer: str, window: NixlWindow) -> None:
        self.tell(do="add", peer=peer, metadata=window.metadata().hex())
        assert self.answer(window) == "added"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def order(memory: Bytes, pieces: int, by: str, peer: str = "w") -> dict[str, Any]:
    return {"do": "write", "peer": peer, "address": memory.ctypes.data, "pieces": pieces, "by": by}


def waiting() -> int:
    """Bytes that have come to this process's TCP sockets and that nobody has read yet."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(str(entry.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in mine)


def caught(writer: Writer, memory: Bytes, pieces: int) -> dict[str, int]:
    """Stop the writer in the middle of a write that nobody serves; what has landed, and what waits in our sockets."""
    assert writer.answer() == "go"
    some = memory[len(memory) // 2 : len(memory) * 3 // 4 : 1024]  # writes begin at the end
    until = time.monotonic() + 20
    while not some.any() and waiting() < 64 << 10 and time.monotonic() < until:
        pass
    halt(writer.process.pid)
    landed = int(np.count_nonzero(memory))
    return {"before": landed, "missing": len(memory) - pieces - landed, "waiting": waiting()}


def made(backend: nixl.NixlBackend, name: str, *, shielded: bool) -> NixlWindow:
    nixl.SHIELD = SHIELD if shielded else {}  # type: ignore[attr-defined]
    return backend.window(name)


def given_up(
    case: str, backend: nixl.NixlBackend, writer: Writer, memory: Bytes, whole: dict[str, Any]
) -> Found:
    """A writer caught in the middle of a write."""
    window = made(backend, "writer", shielded=case != "unshielded")
    other = made(backend, "other", shielded=True)
    writer.add("w", window)
    writer.tell(**whole)
    assert writer.answer() == "go"
    found: Found = {"first": writer.answer(window)}
    for _ in range(10):
        memory[:] = 0
        writer.tell(**whole)
        found |= caught(writer, memory, whole["pieces"])
        if found["missing"]:
            break
        os.kill(writer.process.pid, signal.SIGCONT)
        assert writer.answer(window)
    kept = [window, other] if case.endswith("keep") else [other]
    if case.startswith("kill"):
        writer.end()
    started = time.monotonic()
    if window not in kept:
        window.close()
    found["close_s"] = time.monotonic() - started
    memory[:] = 0
    if case.startswith("kill"):
        for _ in range(200):
            for one in kept:
                one.progress()
            time.sleep(1e-3)
    else:
        os.kill(writer.process.pid, signal.SIGCONT)
        found["write"] = writer.answer(*kept)
    found["landed"] = int(np.count_nonzero(memory))
    for one in kept:
        one.close()
    return found if case.startswith("kill") else found | renewed(backend, writer, memory, whole)


def renewed(backend: nixl.NixlBackend, writer: Writer, memory: Bytes, whole: dict[str, Any]) -> Found:
    """The writer lives, and its next lane reaches a new window over the same memory."""
    memory[:] = 0
    writer.tell(do="renew")
    assert writer.answer() == "renewed"
    window = backend.window("again")
    writer.add(whole["peer"], window)
    writer.tell(**whole)
    assert writer.answer() == "go"
    state = writer.answer(window)["state"]
    window.close()
    return {"again": state, "complete": int(np.count_nonzero(memory)) == len(memory) - whole["pieces"]}


def abandoned(backend: nixl.NixlBackend, writer: Writer, memory: Bytes, whole: dict[str, Any]) -> Found:
    """The writer gives up its write, the window stays."""
    window = backend.window("writer")
    writer.add("w", window)
    writer.tell(**whole)
    assert writer.answer() == "go"
    found: Found = {"first": writer.answer(window)}
    writer.tell(**whole, seconds=0.05)
    assert writer.answer() == "go"
    found["write"] = writer.answer()
    writer.tell(do="renew")
    assert writer.answer() == "renewed"
    memory[:] = 0
    for _ in range(200):
        window.progress()
    found["landed"] = int(np.count_nonzero(memory))
    window.close()
    return found


def crowd(backend: nixl.NixlBackend, writers: list[Writer], memory: Bytes, pieces: int, by: str) -> Found:
    """Round after round, one of three windows is closed at another moment of a write."""
    half = len(memory) // 2
    mine, theirs = memory[:half], memory[half:]
    expected = half - pieces
    first, second = writers
    rounds: list[Found] = []
    untouched = backend.window("second")
    second.add("w", untouched)
    for turn in range(4):
        doomed, spared = backend.window(f"doomed-{turn}"), backend.window(f"spared-{turn}")
        first.add("doomed", doomed)  # in the place of its predecessor, from the second round on
        first.add("spared", spared)
        memory[:] = 0
        second.tell(**order(theirs, pieces, by))
        assert second.answer(untouched) == "go"
        first.tell(**order(mine, pieces, by, "doomed"))
        assert first.answer(untouched) == "go"
        for _ in range(turn * turn * 20):
            doomed.progress()
            untouched.progress()
        doomed.close()
        mine[:] = 0
        found: Found = {"doomed": first.answer(untouched)["state"], "late": int(np.count_nonzero(mine))}
        found["second"] = second.answer(untouched)["state"]
        found["theirs"] = int(np.count_nonzero(theirs)) == expected
        first.tell(**order(mine, pieces, by, "spared"))
        assert first.answer() == "go"
        found["spared"] = first.answer(spared)["state"]
        found["mine"] = int(np.count_nonzero(mine)) == expected
        rounds.append(found)
        spared.close()
    untouched.close()
    return {"rounds": rounds}


def run(case: str, backend: nixl.NixlBackend, writers: list[Writer], memory: Bytes, pieces: int) -> Found:
    case, _, by = case.partition(":")
    if case == "crowd":
        return crowd(backend, writers, memory, pieces, by)
    half = memory[: len(memory) // 2]
    whole = order(half, pieces, by)
    if case == "abandon":
        return abandoned(backend, writers[0], half, whole)
    return given_up(case, backend, writers.pop() if case.startswith("kill") else writers[0], half, whole)


def main() -> None:
    size, pieces, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    backend = nixl.open_backend("owner", options={})
    memory = np.zeros(2 * size, np.uint8)
    backend.register([Region(memory.ctypes.data, memory.nbytes)])
    writers = [Writer(size), Writer(size)]
    everyone = list(writers)
    try:
        found = {case: run(case, backend, writers, memory, pieces) for case in cases}
        found["alive"] = {"writers": [writer.process.poll() is None for writer in writers]}
    finally:
        for writer in everyone:
            writer.end()
    backend.close()
    json.dump(found, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
