"""A lane of a staged backend: a transfer engine fills the mirror, then the bytes go from there to the KV memory.

From a peer on this host they go straight from its mirror, and the engine is only for what cannot be mapped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvd.backends.contract import Holding, Lane, Operation, State, Transfer
from kvd.backends.cuda.driver import CudaError
from kvd.backends.direct.card import Card
from kvd.backends.direct.cuda.copies import CLOSE_S, Flight, wait_over
from kvd.backends.envelope import Envelope, decoded, pack, unpack
from kvd.backends.errors import BackendError, PeerMetadataError, WorkerUnreachable
from kvd.backends.lanes import EngineLane
from kvd.backends.regions import RegisteredMemory, checked
from kvd.backends.staged.memory import NAME, Carrier
from kvd.backends.staged.near import NearSource, Shared
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

VERSION = "1"

_log = logging.getLogger(__name__)


class Mirrored(msgspec.Struct, frozen=True):
    """What a staged backend tells its peers beside its memory: where the mirror of each span is, and whose it is.

    Peers on its host can map the mirrors where there is a ``card``.
    """

    engine: str
    mirrors: tuple[int, ...]
    metadata: bytes
    card: Card | None = None


def write_metadata(agent: str, spans: tuple[Region, ...], mirrored: Mirrored) -> bytes:
    """The bytes to hand to peers."""
    return pack(Envelope(NAME, VERSION, agent, spans, msgspec.msgpack.encode(mirrored)))


@dataclass(frozen=True, slots=True)
class LaneContext:
    """What a lane is told of its backend: its engine, memory with mirrors, device, and what peers on its host map."""

    engine: str
    memory: RegisteredMemory
    device: str
    shared: Shared | None


@dataclass(slots=True)
class StagedPeer:
    """A worker: its memory with its mirrors, and these as mapped here if it is on this host."""

    metadata: bytes
    memory: RegisteredMemory
    near: NearSource | None = None


def read_metadata(metadata: bytes, engine: str) -> tuple[StagedPeer, tuple[Region, ...], Mirrored]:
    """A peer, its spans, and what it tells of their mirrors.

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
            f"the peer names {len(found.mirrors)} mirrors of {len(envelope.regions)} spans",
            backend=NAME,
            hint="run the same version of the connector on both sides",
        )
    return StagedPeer(metadata, RegisteredMemory(envelope.regions, found.mirrors)), envelope.regions, found


@dataclass(slots=True, eq=False)
class _Staging:
    """A transfer of the engine's into the mirror, ``rows`` from there to the memory, and that copy once it is begun.

    From a ``near`` peer there is that copy alone.
    """

    into_mirror: Transfer | None
    rows: Descriptors
    flight: Flight | None = None
    near: NearSource | None = None


class StagedLane(EngineLane[StagedPeer, _Staging]):
    """The way to one peer engine. It only reads: of a push, the decoder takes each layer by itself."""

    def __init__(
        self,
        name: str,
        here: LaneContext,
        inner: Lane,
        carrier: Carrier,
        closed: Callable[[StagedLane], None],
    ) -> None:
        """``inner`` is the engine's lane over the mirrors."""
        super().__init__(name, NAME, closed)
        self._here = here
        self._inner = inner
        self._memory = here.memory
        self._carrier = carrier

    def _holding(self, name: str, known: StagedPeer) -> Holding:
        """The peer's mirrors, which the engine reads; mapped where the peer is on this host."""
        if known.near is not None:
            return known.near.holding(name)
        return Holding(name, known.memory.regions, known.memory.nbytes)

    def _connect(self, peer: str, metadata: bytes) -> None:
        found, spans, told = read_metadata(metadata, self._here.engine)
        self._inner.add(peer, told.metadata)
        found.near = self._near(peer, spans, told)
        known = self._peers.get(peer)
        if known is not None and known.near is not None:
            self._wait_all(f"peer {peer} was added anew", of=known.near)
            known.near.close()
        self._peers[peer] = found

    def _near(self, peer: str, spans: tuple[Region, ...], told: Mirrored) -> NearSource | None:
        """The peer's mirrors, mapped; None where it is elsewhere or they cannot be."""
        mine = self._here.shared
        if mine is None or told.card is None or told.card.process == mine.card.process:
            return None
        try:
            return NearSource(mine.card.process, told.card, spans, self._here.device)
        except WorkerUnreachable as error:
            _log.info("%s of %s is read through the engine: %s", peer, self.name, error.message)
            return None

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """Start reading the peer's mirror: into ours, or into the KV memory itself where it is mapped."""
        known = self._peers[peer]
        self._only_read(peer, operation, "as nobody there would take the bytes out of the mirror")
        if known.near is not None and known.near.ready:
            return self._submit_near(peer, known.near, descriptors)
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

    def _submit_near(self, peer: str, near: NearSource, descriptors: Descriptors) -> Transfer:
        rows = checked(descriptors, self._memory, near.memory, backend=NAME)
        near.check()
        try:
            work = _Staging(None, rows, self._carrier(rows), near)
        except (RuntimeError, OSError) as error:
            raise BackendError(f"the copy out of the peer's mirror: {error}", backend=NAME) from error
        return self._begin(Transfer(peer, rows.nbytes, len(rows), work, backend=NAME))

    def _look(self, work: _Staging, transfer: Transfer) -> None:
        """Go on to the next of the copies."""
        inner = work.into_mirror
        try:
            if inner is not None and work.flight is None and self._inner.poll(inner) is State.DONE:
                work.flight = self._carrier(work.rows)
            if inner is not None and inner.state is State.FAILED:
                self._end(transfer, inner.reason)
            elif work.flight is not None and work.flight.done():
                transfer.detail["device_seconds"] = work.flight.seconds
                # What was read counts only if it was still the peer's afterwards.
                self._end(transfer, work.near.doubt() if work.near is not None else "")
        except (RuntimeError, OSError) as error:
            self._end(transfer, f"the copy out of the mirror: {error}")

    def _stop(self, reason: str) -> None:
        """Waits up to `CLOSE_S` seconds for copies out of the mirror."""
        self._inner.close()
        self._wait_all(reason)
        for name, peer in self._peers.items():
            if peer.near is not None:
                try:
                    peer.near.close()
                except CudaError as error:
                    raise BackendError(
                        f"mirrors of {name} cannot be unmapped: {error}", backend=NAME
                    ) from None
                peer.near = None

    def _wait_all(self, reason: str, *, of: NearSource | None = None) -> None:
        """Wait until the copies out of a peer's mirrors (out of all) have ended; what was pending has failed."""
        until = time.monotonic() + CLOSE_S
        for work, transfer in list(self._live.items()):
            if of is not None and work.near is not of:
                continue
            if work.flight is not None:
                late = f"a copy of lane {self.name!r} still runs after {CLOSE_S} s"
                wait_over(work.flight, until, late, backend=NAME)
            self._end(transfer, reason)
