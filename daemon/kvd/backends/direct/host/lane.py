"""A direct lane: reads the memory of one peer engine's workers on this host, within the calls of its owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.backends.contract import Operation, State, Transfer
from kvd.backends.direct.host.rows import Copy, Spans, checked, unpicked
from kvd.backends.direct.host.source import Source, read_card
from kvd.backends.direct.process import NAME, Process
from kvd.backends.envelope import joined
from kvd.backends.errors import PeerUnreachable, TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Selection

SLICE_S = 0.05
"""How long a call of `submit` or `poll` copies: long beside an owner's pause between polls, short beside a deadline."""


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    source: Source


@dataclass(slots=True, eq=False)
class _Work:
    source: Source
    copy: Copy


class DirectLane:
    """The way to one peer engine on this host. Calls from several threads wait for each other, `close` too.

    Bytes move inside `submit` and `poll` and at no other time, so a transfer nobody polls any more writes nothing.
    """

    def __init__(
        self, name: str, here: Process, regions: Sequence[Region], closed: Callable[[DirectLane], None]
    ) -> None:
        self.name = name
        self._here = here
        self._spans = Spans(joined(regions))
        self._peers: dict[str, _Peer] = {}
        self._live: dict[_Work, Transfer] = {}
        self._closed = closed
        self._open = True
        self._lock = threading.Lock()

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Raises:
            PeerMetadataError: not of this backend, or of another version of it.
            PeerUnreachable: the worker is on another host, gone, or may not be read; with the reason and the cure.
        """
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known and known.metadata == metadata:
                return
            envelope, card = read_card(metadata)
            source = Source(self._here, card, envelope.regions)
            if known:
                self._forget(known.source)
            self._peers[peer] = _Peer(metadata, source)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Begin a read, and copy for at most `SLICE_S` seconds with the GIL released; `poll` goes on with it.

        Raises:
            TransferRefused: a write, an unknown peer, a closed lane, malformed columns, memory that is not registered.
            PeerUnreachable: the peer's process or backend is gone.
        """
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known is None:
                raise TransferRefused(f"peer {peer!r} was not added to lane {self.name!r}", backend=NAME)
            if operation != "read":
                raise TransferRefused(
                    f"{operation} to {peer!r}: this backend only reads, as what it wrote could land after the peer gave"
                    " the memory up",
                    backend=NAME,
                    hint="let the other side read",
                )
            rows = checked(descriptors, self._spans, known.source.spans)
            doubt = known.source.doubt()
            if doubt or known.source.gone:
                raise PeerUnreachable(doubt or "the peer's process is gone", backend=NAME)
            work = _Work(known.source, Copy(rows))
            transfer = Transfer(peer, rows.nbytes, len(rows), work, posted=time.monotonic(), backend=NAME)
            self._live[work] = transfer
            self._copy(work, transfer)
            return transfer

    def submit_selection(self, peer: str, selection: Selection, operation: Operation = "read") -> Transfer:
        """As `submit`: nothing here is worth preparing.

        Raises:
            TransferRefused: as `submit`, columns of unequal length, or a cell that the grid does not have.
            PeerUnreachable: as `submit`.
        """
        return self.submit(peer, unpicked(selection), operation)

    def poll(self, transfer: Transfer) -> State:
        """Copy for at most `SLICE_S` seconds, with the GIL released, and update ``transfer``."""
        with self._lock:
            if transfer.state is State.PENDING:
                if transfer.handle in self._live:
                    self._copy(transfer.handle, transfer)
                else:
                    self._end(transfer, f"not a transfer of lane {self.name!r}")
            return transfer.state

    def close(self) -> None:
        """End the lane: what was pending has failed and copies no more. Waits for a call that copies. Idempotent."""
        with self._lock:
            self._open = False
            for transfer in list(self._live.values()):
                self._end(transfer, f"lane {self.name!r} was closed before the transfer ended")
            while self._peers:
                self._peers.popitem()[1].source.close()
        self._closed(self)

    def _copy(self, work: _Work, transfer: Transfer) -> None:
        until = time.monotonic() + SLICE_S
        reason = ""
        try:
            while not work.copy.complete:
                work.copy.advance(work.source.pid)
                if time.monotonic() > until:
                    break
        except OSError as error:
            at = int(work.copy.rows.remote[work.copy.row]) + work.copy.done
            reason = f"reading at {at:#x} of process {work.source.pid}: {error.strerror}"
        # What was read counts only if the peer was still there afterwards.
        reason = work.source.doubt() or reason
        if reason:
            self._end(transfer, f"transfer with {transfer.peer}: {reason}")
        elif work.copy.complete:
            self._end(transfer, "")

    def _forget(self, source: Source) -> None:
        for work, transfer in list(self._live.items()):
            if work.source is source:
                self._end(transfer, f"peer {transfer.peer} was added anew")
        source.close()

    def _end(self, transfer: Transfer, reason: str) -> None:
        self._live.pop(transfer.handle, None)
        transfer.end(reason)

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)
