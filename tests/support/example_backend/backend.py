"""Reads memory of the same process while it is polled: the least that keeps the contract."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.backends.contract import Operation, Traits, Transfer
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.lanes import EngineBackend, EngineLane
from kvd.backends.options import known_options
from kvd.backends.regions import RegisteredMemory, check_regions, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

NAME = "example"


def open_backend(name: str, *, options: Mapping[str, Any]) -> "ExampleBackend":
    known_options(options, (), backend=NAME)
    return ExampleBackend(name)


class ExampleBackend(EngineBackend["ExampleLane"]):
    traits = Traits()

    def __init__(self, name: str) -> None:
        super().__init__(name, NAME)

    def _register(self, regions: Sequence[Region]) -> None:
        check_regions(regions, backend=NAME, kinds=("cpu",))

    def _describe(self) -> bytes:
        return pack(Envelope(NAME, "1", self.name, self.regions, b""))

    def _lane(self, name: str) -> "ExampleLane":
        return ExampleLane(name, self.regions, self._drop)

    def _end(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class ExamplePeer:
    metadata: bytes
    memory: RegisteredMemory


@dataclass(frozen=True, eq=False)
class ExampleWork:
    rows: Descriptors


class ExampleLane(EngineLane[ExamplePeer, ExampleWork]):
    def __init__(self, name: str, regions: Sequence[Region], closed: Callable[["ExampleLane"], None]) -> None:
        super().__init__(name, NAME, closed)
        self._memory = RegisteredMemory(regions)

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        self._only_read(peer, operation, "as an example")
        rows = checked(descriptors, self._memory, self._peers[peer].memory, backend=NAME)
        return self._begin(Transfer(peer, rows.nbytes, len(rows), ExampleWork(rows)))

    def _connect(self, peer: str, metadata: bytes) -> None:
        envelope = unpack(metadata, backend=NAME, version="1")
        self._peers[peer] = ExamplePeer(metadata, RegisteredMemory(envelope.regions))

    def _look(self, work: ExampleWork, transfer: Transfer) -> None:
        columns = (work.rows.local.tolist(), work.rows.remote.tolist(), work.rows.length.tolist())
        for local, remote, length in zip(*columns, strict=True):
            ctypes.memmove(local, remote, length)
        self._end(transfer)

    def _stop(self, reason: str) -> None:
        self._end_all(reason)
