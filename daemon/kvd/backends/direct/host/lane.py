"""A direct lane: reads the memory of one peer engine's workers on this host, within the calls of its owner."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.backends.contract import Holding, Operation, State, Transfer
from kvd.backends.direct.card import read_card
from kvd.backends.direct.host.copy import Copy
from kvd.backends.direct.host.source import HostSource
from kvd.backends.direct.process import NAME, READS_ONLY, Process
from kvd.backends.lanes import EngineLane
from kvd.backends.regions import RegisteredMemory, check_selection, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, coalesce
from kvd.topology.grid import BlockSelection, Selection

SLICE_S = 0.05
"""How long a call of `submit` or `poll` copies: long beside an owner's pause between polls, short beside a deadline."""


@dataclass(slots=True)
class HostPeer:
    """A worker."""

    metadata: bytes
    source: HostSource


@dataclass(slots=True, eq=False)
class _Reading:
    source: HostSource
    copy: Copy


class DirectLane(EngineLane[HostPeer, _Reading]):
    """The way to one peer engine on this host.

    Bytes move inside `submit` and `poll` and at no other time, so a transfer nobody polls any more writes nothing.
    """

    def __init__(
        self, name: str, here: Process, regions: Sequence[Region], closed: Callable[[DirectLane], None]
    ) -> None:
        super().__init__(name, NAME, closed)
        self._here = here
        self._memory = RegisteredMemory(regions)

    def _holding(self, name: str, known: HostPeer) -> Holding:
        return known.source.holding(name)

    def _connect(self, peer: str, metadata: bytes) -> None:
        envelope, card = read_card(metadata)
        source = HostSource(self._here, card, envelope.regions)
        if known := self._peers.get(peer):
            self._end_all(f"peer {peer} was added anew", lambda work: work.source is known.source)
            known.source.close()
        self._peers[peer] = HostPeer(metadata, source)

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """Copy for at most `SLICE_S` seconds with the GIL released; `poll` goes on with it."""
        known = self._peers[peer]
        self._only_read(peer, operation, READS_ONLY)
        rows = checked(descriptors, self._memory, known.source.memory, backend=NAME)
        known.source.check()
        work = _Reading(known.source, Copy(rows))
        transfer = self._begin(Transfer(peer, rows.nbytes, len(rows), work, backend=NAME))
        self._look(work, transfer)
        return transfer

    def submit_selection(
        self, peer: str, selection: Selection | BlockSelection, operation: Operation = "read"
    ) -> Transfer:
        """As `submit`: nothing here is worth preparing.

        Raises:
            TransferRefused: as `submit`, columns of unequal length, or a cell that the grid does not have.
            WorkerUnreachable: as `submit`.
        """
        check_selection(selection, backend=NAME)
        return self.submit(peer, coalesce(selection.descriptors()), operation)

    def precede(self, transfer: Transfer, stream: int) -> None:  # noqa: ARG002 - the host's work is done when it returns
        """See that the bytes are here, or that they will not come."""
        while self.poll(transfer) is State.PENDING:
            pass

    def _look(self, work: _Reading, transfer: Transfer) -> None:
        """Copy for at most `SLICE_S` seconds, with the GIL released."""
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
            self._end(transfer)

    def _stop(self, reason: str) -> None:
        self._end_all(reason)
        while self._peers:
            self._peers.popitem()[1].source.close()
