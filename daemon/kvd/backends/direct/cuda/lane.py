"""A direct lane between GPUs: one kernel a transfer copies out of the peer's mapped memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.backends.contract import Operation, State, Transfer
from kvd.backends.cuda.ipc import CudaError, Driver
from kvd.backends.direct.cuda.copies import Copier, Flight, over
from kvd.backends.direct.cuda.memory import Mappings
from kvd.backends.direct.cuda.source import CudaSource
from kvd.backends.direct.cuda.tables import Job, Rows, job_of_descriptors, job_of_selection, rows_of
from kvd.backends.direct.host.rows import Spans, checked
from kvd.backends.direct.host.source import read_card
from kvd.backends.direct.process import NAME, Process
from kvd.backends.envelope import joined
from kvd.backends.errors import BackendError, PeerUnreachable, TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import Grid, Selection

CLOSE_S = 10.0
"""How long `close` waits for kernels, which end by themselves in milliseconds."""
_LOOK_S = 50e-6


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    source: CudaSource
    grids: dict[Grid, tuple[Rows, Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Work:
    source: CudaSource
    flight: Flight


class CudaLane:
    """The way to one peer engine on this host, from device memory to device memory. Calls wait for each other.

    A kernel that was launched cannot be called back, but ends by itself, also when the peer is stopped or dead: so
    `close` waits for it.
    """

    def __init__(
        self,
        name: str,
        here: Process,
        regions: Sequence[Region],
        device: Driver,
        mappings: Mappings,
        copier: Copier,
        closed: Callable[[CudaLane], None],
    ) -> None:
        self.name = name
        self._here = here
        self._spans = Spans(joined(regions))
        self._device = device
        self._mappings = mappings
        self._copier = copier
        self._peers: dict[str, _Peer] = {}
        self._live: dict[_Work, Transfer] = {}
        self._closed = closed
        self._open = True
        self._lock = threading.Lock()

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Raises:
            PeerMetadataError: not of this backend, or of another version of it.
            PeerUnreachable: the worker is on another host, gone, or its memory is out of reach; with reason and cure.
        """
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known and known.metadata == metadata:
                return
            envelope, card = read_card(metadata)
            source = CudaSource(self._here, card, envelope.regions, self._device, self._mappings)
            if known:
                self._end_all(f"peer {peer} was added anew", of=known.source)
                known.source.close()
            self._peers[peer] = _Peer(metadata, source)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Launch a kernel that reads.

        Raises:
            TransferRefused: a write, an unknown peer, a closed lane, malformed columns, memory that is not registered.
            PeerUnreachable: the peer's backend is gone.
            BackendError: the device would not take it.
        """
        with self._lock:
            known = self._known(peer, operation)
            rows, job = job_of_descriptors(checked(descriptors, self._spans, known.source.spans))
            return self._begin(peer, known.source, (rows, None), job, (int(rows.lengths.sum()), len(rows)))

    def submit_selection(self, peer: str, selection: Selection, operation: Operation = "read") -> Transfer:
        """As `submit`; the rows of ``selection.grid`` stay on the device, so only numbers of cells are sent.

        Raises:
            TransferRefused: as `submit`, columns of unequal length, or a cell that the grid does not have.
            PeerUnreachable, BackendError: as `submit`.
        """
        with self._lock:
            known = self._known(peer, operation)
            if selection.grid not in known.grids:
                rows = rows_of(selection.grid, self._spans, known.source.spans)
                known.grids[selection.grid] = (rows, _on_device(lambda: self._copier.keep(rows)))
            kept = known.grids[selection.grid]
            return self._begin(
                peer,
                known.source,
                kept,
                job_of_selection(kept[0], selection),
                (selection.nbytes, len(selection)),
            )

    def poll(self, transfer: Transfer) -> State:
        """Look whether the kernel has ended, and update ``transfer``."""
        with self._lock:
            if transfer.state is State.PENDING:
                if transfer.handle in self._live:
                    self._look(transfer.handle, transfer)
                else:
                    self._end(transfer, f"not a transfer of lane {self.name!r}")
            return transfer.state

    def close(self) -> None:
        """End the lane: what was pending has failed, and its kernels have ended. Idempotent.

        Raises:
            BackendError: a kernel still runs after `CLOSE_S` seconds, or memory cannot be unmapped; call again.
        """
        with self._lock:
            self._open = False
            self._end_all(f"lane {self.name!r} was closed before the transfer ended")
            while self._peers:
                name, peer = next(iter(self._peers.items()))
                try:
                    peer.source.close()
                except CudaError as error:
                    raise BackendError(
                        f"memory of {name} cannot be unmapped: {error}", backend=NAME
                    ) from None
                del self._peers[name]
        self._closed(self)

    def _known(self, peer: str, operation: Operation) -> _Peer:
        self._opened()
        known = self._peers.get(peer)
        if known is None:
            raise TransferRefused(f"peer {peer!r} was not added to lane {self.name!r}", backend=NAME)
        if operation != "read":
            raise TransferRefused(
                f"{operation} to {peer!r}: this backend only reads, as what it wrote could land after the peer gave the"
                " memory up",
                backend=NAME,
                hint="let the other side read",
            )
        if doubt := known.source.doubt():
            raise PeerUnreachable(doubt, backend=NAME)
        if known.source.gone:
            raise PeerUnreachable("the peer's process is gone", backend=NAME)
        return known

    def _begin(
        self, peer: str, source: CudaSource, kept: tuple[Rows, Any | None], job: Job, size: tuple[int, int]
    ) -> Transfer:
        work = _Work(source, _on_device(lambda: self._copier.begin(*kept, job)))
        transfer = Transfer(peer, *size, work, posted=time.monotonic(), backend=NAME)
        self._live[work] = transfer
        return transfer

    def _look(self, work: _Work, transfer: Transfer) -> None:
        try:
            if not work.flight.done():
                return
            transfer.detail["device_seconds"] = work.flight.seconds
            reason = work.source.doubt()
        except (RuntimeError, OSError) as error:
            reason = str(error)
        self._end(transfer, f"transfer with {transfer.peer}: {reason}" if reason else "")

    def _end_all(self, reason: str, *, of: CudaSource | None = None) -> None:
        """Wait until the kernels of a source (of all) have ended; what was pending has failed."""
        until = time.monotonic() + CLOSE_S
        for work, transfer in list(self._live.items()):
            if of is not None and work.source is not of:
                continue
            while not over(work.flight):
                if time.monotonic() > until:
                    raise BackendError(
                        f"a kernel of lane {self.name!r} still runs after {CLOSE_S} s", backend=NAME
                    )
                time.sleep(_LOOK_S)
            self._end(transfer, reason)

    def _end(self, transfer: Transfer, reason: str) -> None:
        self._live.pop(transfer.handle, None)
        transfer.end(reason)

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)


def _on_device(call: Callable[[], Any]) -> Any:
    """Run a call that torch or Triton answer.

    Raises:
        BackendError: their error, with its own words.
    """
    try:
        return call()
    except RuntimeError as error:
        raise BackendError(f"the device would not take the copy: {error}", backend=NAME) from error
