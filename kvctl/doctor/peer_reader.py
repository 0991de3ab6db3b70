"""A process that reads a worker's null block over a transfer engine: `python -m kvctl.processes.tied PARENT THIS`.

In a process of its own: a transfer engine prints where it likes, and may take the process down with it.
"""

from __future__ import annotations

import time
from base64 import b64decode

import numpy as np

from kvctl.bench.memory import anonymous
from kvctl.processes.commands import JsonCommand, JsonResult, serve
from kvd.backends.contract import Backend, Lane, State
from kvd.backends.errors import BackendError
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

ROUNDS = 5
"""Reads after the first one, which connects."""
POLL = 50e-6
LANE = "kvctl-doctor"


class PeerReader:
    """A backend with a buffer as long as what is read, and the lane to the worker."""

    def __init__(self, who: JsonCommand) -> None:
        """Raises `BackendError` where the engine cannot be opened, or does not take the worker's metadata."""
        remote, length = (np.array(who[name], np.int64) for name in ("remote", "length"))
        self._buffer = np.frombuffer(anonymous(int(length.sum())), np.uint8)
        start = self._buffer.ctypes.data
        self._rows = Descriptors(start + np.cumsum(length) - length, remote, length)
        self._peer = who["worker"]
        self.backend: Backend = open_backend(who["backend"], LANE, who["options"])
        self.backend.register([Region(start, self._buffer.nbytes)])
        self._lane: Lane = self.backend.lane(LANE)
        self._lane.add(self._peer, b64decode(who["metadata"]))

    def read(self, seconds: float) -> float:
        """Read all rows once; how long that took. Raises `BackendError`."""
        began = time.perf_counter()
        transfer = self._lane.submit(self._peer, self._rows)
        while (state := self._lane.poll(transfer)) is State.PENDING:
            if time.perf_counter() - began > seconds:
                raise BackendError(f"no byte of it came within {seconds:g} s")
            time.sleep(POLL)
        if state is State.FAILED:
            raise BackendError(transfer.reason)
        return time.perf_counter() - began


def main() -> None:
    """Answer commands until stdin ends."""

    def read(reader: PeerReader, command: JsonCommand) -> JsonResult:
        return {"seconds": [reader.read(command["seconds"]) for _ in range(1 + ROUNDS)]}

    serve(lambda who: (PeerReader(who), {}), {"read": read}, lambda reader: reader.backend.close())


if __name__ == "__main__":
    main()
