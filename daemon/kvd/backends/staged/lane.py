"""A lane of a staged backend: a transfer engine fills the mirror, then the bytes go from there to the KV memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvd.backends.contract import Lane, Operation, State, Transfer
from kvd.backends.direct.cuda.copies import CLOSE_S, Flight, wait_over
from kvd.backends.envelope import Envelope, decoded, pack, unpack
from kvd.backends.errors import PeerMetadataError
from kvd.backends.lanes import EngineLane
from kvd.backends.regions import RegisteredMemory, checked
from kvd.backends.staged.memory import NAME, Carrier
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

VERSION = "1"


class Mirrored(msgspec.Struct, frozen=True):
    """What a staged backend tells its peers beside its memory: where the mirror of each span is, and whose it is."""

    engine: str
    mirrors: tuple[int, ...]
    metadata: bytes


def write_metadata(agent: str, spans: tuple[Region, ...], mirrored: Mirrored) -> bytes:
    """The bytes to hand to peers."""
    return pack(Envelope(NAME, VERSION, agent, spans, msgspec.msgpack.encode(mirrored)))


@dataclass(frozen=True, slots=True)
class StagedPeer:
    """A worker: its memory with its mirrors."""

    metadata: bytes
    memory: RegisteredMemory


def read_metadata(metadata: bytes, engine: str) -> tuple[StagedPeer, bytes]:
    """A peer, and the metadata of its engine.

    Raises:
        PeerMetadataError: of another backend, version or engine, or damaged.
    """
    envelope = unpack(metadata, backend=NAME, version=VERSION)
    found = decoded(envelope.blob, Mirrored, backend=NAME, decode=msgspec.msgpack.decode)
    if found.engine != engine:
        raise PeerMetadataError(
            f"the engine behind staged is {found.engine} at the peer and {engine} here",
            backend=NAME,
            hint="set the same engine on both sides",
        )
    if len(found.mirrors) != len(envelope.regions):
        raise PeerMetadataError(
            f"the peer names {len(found.mirrors)} mirrors of {len(envelope.regions)} spans", backend=NAME
        )
    return StagedPeer(metadata, RegisteredMemory(envelope.regions, found.mirrors)), found.metadata


@dataclass(slots=True, eq=False)
class _Staging:
    """A transfer of the engine's into the mirror, ``rows`` from there to the memory, and that copy once it is begun."""

    into_mirror: Transfer
    rows: Descriptors
    flight: Flight | None = None


class StagedLane(EngineLane[StagedPeer, _Staging]):
    """The way to one peer engine. It only reads: of a push, the decoder takes each layer by itself."""

    def __init__(
        self,
        name: str,
        engine: str,
        inner: Lane,
        memory: RegisteredMemory,
        carrier: Carrier,
        closed: Callable[[StagedLane], None],
    ) -> None:
        """``inner`` is the engine's lane over the mirrors, ``memory`` this worker's with them."""
        super().__init__(name, NAME, closed)
        self._engine = engine
        self._inner = inner
        self._memory = memory
        self._carrier = carrier

    def _connect(self, peer: str, metadata: bytes) -> None:
        found, theirs = read_metadata(metadata, self._engine)
        self._inner.add(peer, theirs)
        self._peers[peer] = found

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """Start reading the peer's mirror into ours."""
        known = self._peers[peer]
        self._only_read(peer, operation, "as nobody there would take the bytes out of the mirror")
        # Remote addresses are of the mirror from here on.
        rows = checked(descriptors, self._memory, known.memory, backend=NAME)
        mirror = self._memory.seen_at(rows.local)
        inner = self._inner.submit(peer, Descriptors(mirror, rows.remote, rows.length))
        work = _Staging(inner, Descriptors(rows.local, mirror, rows.length))
        # An engine that copies while it posts would keep what is in the mirror from the GPU until all is posted.
        for earlier, its in list(self._live.items()):
            self._look(earlier, its)
        transfer = self._begin(Transfer(peer, inner.bytes, inner.descriptors, work, backend=NAME))
        transfer.posted = inner.posted
        return transfer

    def _look(self, work: _Staging, transfer: Transfer) -> None:
        """Go on to the next of the two copies."""
        try:
            if work.flight is None and self._inner.poll(work.into_mirror) is State.DONE:
                work.flight = self._carrier(work.rows)
            if work.into_mirror.state is State.FAILED:
                self._end(transfer, work.into_mirror.reason)
            elif work.flight is not None and work.flight.done():
                transfer.detail["device_seconds"] = work.flight.seconds
                self._end(transfer)
        except (RuntimeError, OSError) as error:
            self._end(transfer, f"the copy out of the mirror: {error}")

    def _stop(self, reason: str) -> None:
        """Waits up to `CLOSE_S` seconds for copies out of the mirror."""
        self._inner.close()
        until = time.monotonic() + CLOSE_S
        for work, transfer in list(self._live.items()):
            if work.flight is not None:
                late = f"a copy of lane {self.name!r} still runs after {CLOSE_S} s"
                wait_over(work.flight, until, late, backend=NAME)
            self._end(transfer, reason)
