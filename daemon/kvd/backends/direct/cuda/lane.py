"""A direct lane between GPUs: one kernel a transfer copies out of the peer's mapped memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.backends.contract import Holding, Operation, Transfer
from kvd.backends.cuda.driver import CudaError
from kvd.backends.cuda.ipc import Driver
from kvd.backends.direct.card import read_card
from kvd.backends.direct.cuda.copies import CLOSE_S, Copier, LaunchedFlight, wait_over
from kvd.backends.direct.cuda.memory import Mappings
from kvd.backends.direct.cuda.source import CudaSource
from kvd.backends.direct.cuda.tables import Job, Rows, job_of_blocks, job_of_descriptors, rows_of
from kvd.backends.direct.process import NAME, READS_ONLY, Process
from kvd.backends.errors import BackendError
from kvd.backends.lanes import EngineLane
from kvd.backends.regions import RegisteredMemory, check_selection, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection, Grid, Selection

_TELLING = 8 << 20
"""Bytes of a copy from which its rate says what others of any size will take."""
_NEAR_S, _PAST_S = 150e-6, 200e-6
"""Until when a copy that is looked at is waited for: so long before it is due, and so long after."""


@dataclass(slots=True)
class CudaPeer:
    """A worker, and the rows of its grids that are on the device."""

    metadata: bytes
    source: CudaSource
    grids: dict[Grid, tuple[Rows, Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Launch:
    source: CudaSource
    flight: LaunchedFlight


class CudaLane(EngineLane[CudaPeer, _Launch]):
    """The way to one peer engine on this host, from device memory to device memory.

    A kernel that was launched cannot be called back, but ends by itself, also when the peer is stopped or dead: so
    `close` waits for it, for `CLOSE_S` seconds at most.
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
        super().__init__(name, NAME, closed)
        self._here = here
        self._memory = RegisteredMemory(regions)
        self._device = device
        self._mappings = mappings
        self._copier = copier
        self._rate = 0.0  # bytes a second of the last large copy
        self._free_at = 0.0  # when the last one that was begun should be over
        self._over = 0.0  # when the last one that was looked at was over

    def _holding(self, name: str, known: CudaPeer) -> Holding:
        return known.source.holding(name)

    def _connect(self, peer: str, metadata: bytes) -> None:
        envelope, card = read_card(metadata)
        source = CudaSource(self._here, card, envelope.regions, self._device, self._mappings)
        if known := self._peers.get(peer):
            self._wait_all(f"peer {peer} was added anew", of=known.source)
            known.source.close()
        self._peers[peer] = CudaPeer(metadata, source)

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """Launch a kernel that reads."""
        known = self._peers[peer]
        self._readable(peer, known, operation)
        allowed = checked(descriptors, self._memory, known.source.memory, backend=NAME)
        rows, job = job_of_descriptors(allowed, self._copier.waste)
        return self._launch(peer, known, (rows, None), job, (int(rows.lengths.sum()), len(rows)))

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """As `submit`; the rows of ``selection.grid`` stay on the device, so of blocks only their numbers are sent.

        Raises:
            TransferRefused: as `submit`, columns of unequal length, or a row, block or cell that the grid lacks.
            WorkerUnreachable, BackendError: as `submit`.
        """
        with self._lock:
            known = self._known(peer)
            self._readable(peer, known, operation)
            if selection.grid not in known.grids:
                rows = rows_of(selection.grid, self._memory, known.source.memory)
                known.grids[selection.grid] = (rows, _on_device(lambda: self._copier.keep(rows)))
            if not isinstance(selection, BlockSelection):
                check_selection(selection, backend=NAME)
                return self._submit(peer, selection.descriptors(), operation)
            kept = known.grids[selection.grid]
            job = job_of_blocks(kept[0], selection, self._copier.waste)
            return self._launch(peer, known, kept, job, (selection.nbytes, len(selection)))

    def precede(self, transfer: Transfer, stream: int) -> None:
        """Have the stream wait for a transfer of this lane. Raises `BackendError`."""
        try:
            transfer.handle.flight.precede(stream)
        except RuntimeError as error:
            raise BackendError(f"the device would not wait for the copy: {error}", backend=NAME) from error

    def _stop(self, reason: str) -> None:
        self._wait_all(reason)
        while self._peers:
            name, peer = next(iter(self._peers.items()))
            try:
                peer.source.close()
            except CudaError as error:
                raise BackendError(f"memory of {name} cannot be unmapped: {error}", backend=NAME) from None
            del self._peers[name]

    def _readable(self, peer: str, known: CudaPeer, operation: Operation) -> None:
        self._only_read(peer, operation, READS_ONLY)
        known.source.check()

    def _launch(
        self, peer: str, known: CudaPeer, kept: tuple[Rows, Any | None], job: Job, size: tuple[int, int]
    ) -> Transfer:
        work = _Launch(known.source, _on_device(lambda: self._copier.begin(*kept, job)))
        before = self._free_at if self._live else 0.0
        transfer = self._begin(Transfer(peer, *size, work, backend=NAME))
        if self._rate:
            # Copies of one lane follow each other, and one has begun before its launch returns.
            self._free_at = max(before, transfer.posted) + transfer.bytes / self._rate
            transfer.due = self._free_at
        return transfer

    def _look(self, work: _Launch, transfer: Transfer) -> None:
        left = transfer.due - time.monotonic()
        try:
            # Whoever looks now looks for the end. To sleep that little would take longer, and a kernel ends by itself.
            if not work.flight.done(wait=-_PAST_S < left < _NEAR_S):
                return
            seconds = transfer.detail["device_seconds"] = work.flight.seconds
            if transfer.bytes > _TELLING and seconds:
                self._rate = transfer.bytes / seconds
            reason = work.source.doubt()
        except (RuntimeError, OSError) as error:
            reason = str(error)
        self._end(transfer, f"transfer with {transfer.peer}: {reason}" if reason else "")
        if not reason:  # the look may come much later; copies of one lane follow each other
            transfer.ended = min(transfer.ended, max(transfer.posted, self._over) + work.flight.seconds)
            self._over = transfer.ended

    def _wait_all(self, reason: str, *, of: CudaSource | None = None) -> None:
        """Wait until the kernels of a source (of all) have ended; what was pending has failed."""
        until = time.monotonic() + CLOSE_S
        for work, transfer in list(self._live.items()):
            if of is not None and work.source is not of:
                continue
            late = f"a kernel of lane {self.name!r} still runs after {CLOSE_S} s"
            wait_over(work.flight, until, late, backend=NAME)
            self._end(transfer, reason)


def _on_device(call: Callable[[], Any]) -> Any:
    """Run a call that torch or Triton answer.

    Raises:
        BackendError: their error, with its own words.
    """
    try:
        return call()
    except RuntimeError as error:
        raise BackendError(f"the device would not take the copy: {error}", backend=NAME) from error
