"""A lane of a staged backend: a transfer engine fills the mirror, then the bytes go from there to the KV memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvd.backends.contract import Lane, Operation, State, Transfer
from kvd.backends.direct.cuda.copies import Flight, over
from kvd.backends.direct.host.rows import Spans, checked
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.errors import BackendError, PeerMetadataError, TransferRefused
from kvd.backends.staged.memory import NAME, Carrier
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

VERSION = "1"
CLOSE_S = 10.0
"""How long `close` waits for copies out of the mirror, which end by themselves in milliseconds."""
_LOOK_S = 50e-6


class Mirrored(msgspec.Struct, frozen=True):
    """What a staged backend tells its peers beside its memory: where the mirror of each span is, and whose it is."""

    engine: str
    mirrors: tuple[int, ...]
    metadata: bytes


def write_metadata(agent: str, spans: tuple[Region, ...], mirrored: Mirrored) -> bytes:
    """The bytes to hand to peers."""
    return pack(Envelope(NAME, VERSION, agent, spans, msgspec.msgpack.encode(mirrored)))


def read_metadata(metadata: bytes, engine: str) -> tuple[Spans, bytes]:
    """A peer's memory with its mirrors, and the metadata of its engine.

    Raises:
        PeerMetadataError: of another backend, version or engine, or damaged.
    """
    envelope = unpack(metadata, backend=NAME, version=VERSION)
    try:
        found = msgspec.msgpack.decode(envelope.blob, type=Mirrored)
    except msgspec.DecodeError as error:
        raise PeerMetadataError(f"the peer's metadata cannot be read: {error}", backend=NAME) from None
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
    return Spans(envelope.regions, found.mirrors), found.metadata


@dataclass(slots=True, eq=False)
class _Work:
    """A transfer of the engine's into the mirror, ``rows`` from there to the memory, and that copy once it is begun."""

    into_mirror: Transfer
    rows: Descriptors
    flight: Flight | None = None


class StagedLane:
    """The way to one peer engine. It only reads: of a push, the decoder takes each layer by itself."""

    def __init__(
        self,
        name: str,
        engine: str,
        inner: Lane,
        local: Spans,
        carrier: Carrier,
        closed: Callable[[StagedLane], None],
    ) -> None:
        """``inner`` is the engine's lane over the mirrors, ``local`` this worker's memory with them."""
        self.name = name
        self._engine = engine
        self._inner = inner
        self._local = local
        self._carrier = carrier
        self._closed = closed
        self._peers: dict[str, Spans] = {}
        self._live: dict[_Work, Transfer] = {}
        self._open = True

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Raises:
            PeerMetadataError: not of this backend, of another version of it or of another engine.
            BackendError: as the engine's lane.
        """
        self._opened()
        spans, theirs = read_metadata(metadata, self._engine)
        self._inner.add(peer, theirs)
        self._peers[peer] = spans

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Start reading the peer's mirror into ours.

        Raises:
            TransferRefused: a write, an unknown peer, a closed lane, malformed columns, memory that is not registered.
            BackendError: as the engine's lane.
        """
        self._opened()
        if peer not in self._peers:
            raise TransferRefused(f"peer {peer!r} was not added to lane {self.name!r}", backend=NAME)
        if operation != "read":
            raise TransferRefused(
                f"{operation} to {peer!r}: this backend only reads, as nobody there would take the bytes out of the"
                " mirror",
                backend=NAME,
                hint="let the other side read",
            )
        rows = checked(descriptors, self._local, self._peers[peer])  # remote addresses are of the mirror now
        mirror = self._local.where(rows.local) if len(rows) else rows.local
        inner = self._inner.submit(peer, Descriptors(mirror, rows.remote, rows.length))
        work = _Work(inner, Descriptors(rows.local, mirror, rows.length))
        transfer = Transfer(peer, inner.bytes, inner.descriptors, work, posted=inner.posted, backend=NAME)
        # An engine that copies while it posts would keep what is in the mirror from the GPU until all is posted.
        for earlier in list(self._live.values()):
            self.poll(earlier)
        self._live[work] = transfer
        return transfer

    def poll(self, transfer: Transfer) -> State:
        """Look once, go on to the next of the two copies, and update ``transfer``."""
        if transfer.state is not State.PENDING:
            return transfer.state
        if transfer.handle not in self._live:
            self._end(transfer, f"not a transfer of lane {self.name!r}")
            return transfer.state
        work: _Work = transfer.handle
        try:
            if work.flight is None and self._inner.poll(work.into_mirror) is State.DONE:
                work.flight = self._carrier.begin(work.rows)
            if work.into_mirror.state is State.FAILED:
                self._end(transfer, work.into_mirror.reason)
            elif work.flight is not None and work.flight.done():
                transfer.detail["device_seconds"] = work.flight.seconds
                self._end(transfer, "")
        except (RuntimeError, OSError) as error:
            self._end(transfer, f"the copy out of the mirror: {error}")
        return transfer.state

    def close(self) -> None:
        """End the lane: what was pending has failed, and nothing of it lands any more. Idempotent.

        Raises:
            BackendError: as the engine's lane, or a copy that still runs after `CLOSE_S` seconds; call again.
        """
        self._open = False
        self._inner.close()
        until = time.monotonic() + CLOSE_S
        for work, transfer in list(self._live.items()):
            while work.flight is not None and not over(work.flight):
                if time.monotonic() > until:
                    raise BackendError(
                        f"a copy of lane {self.name!r} still runs after {CLOSE_S} s", backend=NAME
                    )
                time.sleep(_LOOK_S)
            self._end(transfer, f"lane {self.name!r} was closed before the transfer ended")
        self._closed(self)

    def _end(self, transfer: Transfer, reason: str) -> None:
        self._live.pop(transfer.handle, None)
        transfer.end(reason)

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)
