"""Reads memory of the same process while it is polled: the least that keeps the contract."""

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.backends.contract import Operation, Traits, Transfer
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.lanes import EngineLane, Holdings
from kvd.backends.options import known_options
from kvd.backends.regions import RegisteredMemory, check_regions, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

NAME = "example"


def open_backend(name: str, *, options: Mapping[str, Any]) -> "ExampleBackend":
    known_options(options, (), backend=NAME)
    return ExampleBackend(name)


class ExampleBackend:
    traits = Traits(late_writes_stop_at="transfer")

    def __init__(self, name: str) -> None:
        self.name = name
        self.regions: tuple[Region, ...] = ()
        self._holdings = Holdings(name, NAME)

    def register(self, regions: Sequence[Region]) -> None:
        self._holdings.registering()
        check_regions(regions, backend=NAME, kinds=("cpu",))
        self.regions = tuple(regions)
        self._holdings.registered()

    def metadata(self) -> bytes:
        self._holdings.opened(registered=True)
        return pack(Envelope(NAME, "1", self.name, self.regions, b""))

    def lane(self, name: str) -> "ExampleLane":
        self._holdings.opened(registered=True)
        return self._holdings.keep(ExampleLane(name, self))

    def close(self) -> None:
        self._holdings.close()

    def drop(self, lane: "ExampleLane") -> None:
        self._holdings.drop(lane)


@dataclass(frozen=True, eq=False)
class ExamplePeer:
    metadata: bytes
    memory: RegisteredMemory


@dataclass(frozen=True, eq=False)
class ExampleWork:
    rows: Descriptors


class ExampleLane(EngineLane[ExamplePeer, ExampleWork]):
    def __init__(self, name: str, backend: ExampleBackend) -> None:
        super().__init__(name, NAME, backend.drop)
        self._memory = RegisteredMemory(backend.regions)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        known = self._known(peer)
        self._only_read(peer, operation, "as an example")
        rows = checked(descriptors, self._memory, known.memory, backend=NAME)
        work = ExampleWork(rows)
        transfer = Transfer(peer, rows.nbytes, len(rows), work, posted=time.monotonic())
        self._live[work] = transfer
        return transfer

    def _connect(self, peer: str, metadata: bytes, known: ExamplePeer | None) -> None:  # noqa: ARG002
        envelope = unpack(metadata, backend=NAME, version="1")
        self._peers[peer] = ExamplePeer(metadata, RegisteredMemory(envelope.regions))

    def _look(self, work: ExampleWork, transfer: Transfer) -> None:
        columns = (work.rows.local.tolist(), work.rows.remote.tolist(), work.rows.length.tolist())
        for local, remote, length in zip(*columns, strict=True):
            ctypes.memmove(local, remote, length)
        self._end(transfer)

    def _stop(self, reason: str) -> None:
        self._end_all(reason)
