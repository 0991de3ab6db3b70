"""Reads of a peer's null block, so that the first load finds a connection, and to see how fast the path is.

A transfer engine connects, maps the peer's memory and prepares its lists with the first transfer of a lane. So when a
peer becomes known the lane's thread reads its null block into the one here, every row of it, from every worker that the
plan reads from. Block 0 of a group belongs to no request in vLLM. So what is read is never a request's, and what lands
there late harms nobody. The block holds zeros on both sides, or what vLLM's own warm-up left there. Kernels look at
masked places of it, so it must stay finite. A copy of the peer's is as good as our own.

Between GPUs the reads then go on for a moment and are judged (`kvd.topology.rate.slow_probe`). A load that arrives ends
that; the one read that is under way is at most `READ_BYTES`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvd.backends.contract import Lane, State, Transfer, takes_selections
from kvd.backends.errors import BackendError
from kvd.shown import logger
from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors, concatenate
from kvd.topology.grid import BlockSelection, RowBlocks
from kvd.topology.plan import Plan
from kvd.topology.rate import PIECE, PROBED_BYTES, ROUNDS, Probed
from kvd.topology.transfer_topology import RemoteEngine
from kvd.worker.load import state_of, submitted

log = logger(__name__)

PROBE_SECONDS = 10.0
"""How long the first reads may take: a connection, on a busy machine."""
READ_BYTES = PROBED_BYTES
"""What one read of one worker has about: 0.8 ms at 5 GB/s."""
MEASURE_BYTES, MEASURE_SECONDS = 64 << 20, 0.05
"""Where measuring ends."""
BARE = 64
"""Bytes of each row in the reads that show what all but the bytes takes."""

Told = Callable[[RemoteEngine, str, list[Probed]], None]
"""Told of a peer that was probed, by which backend (empty: the backend's own), and what was measured, if anything."""


@dataclass(slots=True)
class _Sample:
    """Reads of one worker: rows with all their bytes and with next to none, and the seconds that each took."""

    full: Descriptors
    bare: Descriptors
    took: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def result(self) -> Probed:
        return Probed(
            self.full.nbytes - self.bare.nbytes, len(self.full), tuple(self.took[0]), tuple(self.took[1])
        )


class Probing:
    """The probe of one lane, one at a time; used by the lane's thread.

    Any thread reads its ``rate``. ``posted`` is the time.monotonic() of the last read. ``told`` is None where nothing
    is to be read.
    """

    def __init__(self, engine_id: str, told: Told | None) -> None:
        self._engine_id = engine_id
        self._told = told
        self._peer: RemoteEngine | None = None
        self._transfers: list[Transfer] = []
        self.posted = 0.0
        self.rate = 0.0
        """Bytes a second of the fastest read so far, by the device's own time; 0 where nobody told that."""
        self._deadline = self._measured = 0.0
        self._bytes = 0
        self._samples: dict[int, _Sample] = {}
        self._rounds: deque[tuple[int, int]] = deque()
        self._now: tuple[int, int] | None = None

    @property
    def on(self) -> bool:
        """Whether reads are under way."""
        return self._peer is not None

    def begin(self, peer: RemoteEngine, lane: Lane) -> str:
        """Post the first reads, of all workers. What went wrong, or nothing."""
        if self._told is None:
            return ""
        self._peer, self._transfers, self._now = peer, [], None
        self.posted = time.monotonic()
        self._deadline, self._measured, self._bytes = self.posted + PROBE_SECONDS, 0.0, 0
        self._samples, self._rounds, self.rate = {}, deque(), 0.0
        try:
            for position in peer.plan.sources:
                for copies in null_reads(peer.plan, position, selection=takes_selections(lane)):
                    self._post(lane, position, copies)
        except BackendError as error:
            return self._failed(str(error))
        except Exception as error:  # of any library; it must not keep a peer from being known
            log.exception("probe of peer %s", self._engine_id)
            return self._failed(str(error) or type(error).__name__)
        return ""

    def look(self, lane: Lane, *, alone: bool) -> str:
        """Poll, and post the next read where nothing else is on the lane (``alone``). What went wrong, or nothing.

        After that the lane is not to be trusted: bytes of the probe may be under way.
        """
        if self._peer is None:
            return ""
        now = time.monotonic()
        try:
            if not self._ended(lane):
                late = now > self._deadline and alone
                return self._failed(f"not complete within {PROBE_SECONDS:g} s") if late else ""
            self._note(time.monotonic() - self.posted)
            if alone and self._more(now):
                self._next(lane)
                return ""
        except BackendError as error:
            return self._failed(str(error))
        except Exception as error:  # as above
            log.exception("probe of peer %s", self._engine_id)
            return self._failed(str(error) or type(error).__name__)
        self._tell()
        return ""

    def stop(self) -> None:
        """Its lane is gone, or about to be."""
        self._peer, self._transfers = None, []

    def _ended(self, lane: Lane) -> bool:
        pending = False
        for transfer in self._transfers:
            state = state_of(transfer, lane)
            if state is State.FAILED:
                raise BackendError(f"{transfer.peer}: {transfer.reason}")
            pending = pending or state is State.PENDING
        return not pending

    def _note(self, seconds: float) -> None:
        for transfer in self._transfers:
            if took := transfer.detail.get("device_seconds"):
                self.rate = max(self.rate, transfer.bytes / took)
        if self._now is not None:
            position, which = self._now
            self._samples[position].took[which].append(seconds)
        elif self._peer is not None:
            log.info("peer %s: read its null block in %.1f ms", self._engine_id, seconds * 1e3)

    def _more(self, now: float) -> bool:
        """Whether another read is to be measured; sets them up with the first."""
        peer = self._peer
        if peer is None or not all(device.startswith("cuda") for device in peer.devices):
            return False
        if not self._measured:
            self._measured = now
            self._samples = {p: s for p in peer.plan.sources if (s := sample(peer.plan, p)) is not None}
            self._rounds.extend((p, which) for p in self._samples for _ in range(ROUNDS) for which in (1, 0))
        return bool(self._rounds) and now - self._measured < MEASURE_SECONDS and self._bytes < MEASURE_BYTES

    def _next(self, lane: Lane) -> None:
        self._now = position, which = self._rounds.popleft()
        rows = (self._samples[position].full, self._samples[position].bare)[which]
        self._transfers, self.posted = [], time.monotonic()
        self._post(lane, position, Copies(rows))
        self._bytes += rows.nbytes

    def _post(self, lane: Lane, position: int, copies: Copies) -> None:
        if self._peer is not None:
            name = str(self._peer.plan.remote_ranks[position])
            self._transfers.extend(submitted(lane, name, copies))

    def _tell(self) -> None:
        peer, transfers = self._peer, self._transfers
        results = [sample.result for sample in self._samples.values()]
        self.stop()
        if peer is not None and self._told is not None:
            self._told(peer, next((t.backend for t in transfers if t.backend), ""), results)

    def _failed(self, why: str) -> str:
        self.stop()
        log.warning(
            "probe of peer %s: its null block could not be read: %s; the first load will try anew",
            self._engine_id,
            why,
        )
        return why


def null_reads(plan: Plan, position: int, *, selection: bool) -> Iterator[Copies]:
    """The first reads of one remote worker's null block: by address, and with ``selection`` by number too, as a load.

    Long rows are cut: every row is read, since each may be in memory that is mapped by itself, but only a part of it.
    By number rows are read whole, so only the first ones are; what counts is that the grid is prepared. All workers'
    reads together are about twice `READ_BYTES`.
    """
    most = READ_BYTES // len(plan.sources)
    yield Copies(_clipped(_null_rows(plan, position), most))
    grid = plan.grids[position][0]
    if selection and grid.numbered:
        rows = min(len(grid), max(1, int(np.searchsorted(np.cumsum(grid.length), most))))
        null = np.zeros(1, np.int32)
        part = RowBlocks(0, rows, null, null)
        yield Copies(selection=BlockSelection(grid, (part,), int(grid.length[:rows].sum())))


def sample(plan: Plan, position: int) -> _Sample | None:
    """Reads of one remote worker that can tell how fast it is; None where its rows are too short for that."""
    rows = _clipped(_null_rows(plan, position), READ_BYTES)
    if rows.nbytes < PIECE * len(rows) or not len(rows):
        return None
    rows = concatenate([rows] * -(-READ_BYTES // rows.nbytes))
    return _Sample(rows, Descriptors(rows.local, rows.remote, np.minimum(rows.length, BARE)))


def _null_rows(plan: Plan, position: int) -> Descriptors:
    """Every row of the plan in block 0 of both sides; of unequal block sizes all parts of the larger block."""
    return concatenate([read.rows for read in plan.reads if read.remote == position])


def _clipped(rows: Descriptors, most: int) -> Descriptors:
    """At most about ``most`` bytes of all rows, but no row shorter than it has to be for its rate to tell."""
    each = max(PIECE, most // max(1, len(rows)) // PIECE * PIECE)
    return Descriptors(rows.local, rows.remote, np.minimum(rows.length, each))
