"""A Mooncake lane: the way to one peer engine, one engine of Mooncake's for each of its workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd.backends.contract import Holding, Operation, Transfer
from kvd.backends.envelope import same_minor_release, unpack
from kvd.backends.errors import TransferRefused
from kvd.backends.lanes import EngineLane
from kvd.backends.mooncake.connect import connect
from kvd.backends.mooncake.engine import COMPLETED, WAITING, MooncakeEngine, knock
from kvd.backends.mooncake.library import LOG, NAME
from kvd.backends.mooncake.options import NVLINK, MooncakeOptions
from kvd.backends.mooncake.pieces import cut
from kvd.backends.mooncake.target import EngineTarget, parse_target
from kvd.backends.regions import RegisteredMemory, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

COPIED_AT_ONCE = 4096
"""Rows of one call where Mooncake copies while it is called."""
_ALIVE = "the peer refused the address, made no progress for Mooncake's 30 s, or a connection broke"


@dataclass(slots=True, eq=False)
class _Pieces:
    """What `Transfer.handle` points at: the pieces, how many are posted and over, and what went wrong."""

    peer: MooncakePeer
    operation: Operation
    local: list[int]
    remote: list[int]
    length: list[int]
    posted: int = 0
    over: int = 0
    failed: str = ""


@dataclass(slots=True, eq=False)
class MooncakePeer:
    """One worker of the peer engine, its engine here, the works not yet all posted and the pieces under way."""

    metadata: bytes
    target: EngineTarget
    memory: RegisteredMemory
    engine: MooncakeEngine
    queue: deque[_Pieces] = field(default_factory=deque)
    flying: deque[tuple[int, _Pieces, int]] = field(default_factory=deque)


class MooncakeLane(EngineLane[MooncakePeer, _Pieces]):
    """The way to one peer engine: an engine of Mooncake's for each of its workers.

    With CUDA IPC Mooncake copies while it is called, so a transfer is over when it is submitted. Otherwise a piece
    is a batch of Mooncake's of its own: that is the only kind whose state can be asked without waiting for it.
    """

    def __init__(
        self,
        name: str,
        options: MooncakeOptions,
        regions: Sequence[Region],
        *,
        version: str,
        make: Callable[[], MooncakeEngine],
        closed: Callable[[MooncakeLane], None],
    ) -> None:
        super().__init__(name, NAME, closed)
        self._options = options
        self._version = version
        self._memory = RegisteredMemory(regions)
        self._make = make
        self._ending: list[MooncakeEngine] = []

    def _holding(self, name: str, known: MooncakePeer) -> Holding:
        """With CUDA IPC Mooncake maps what it copies from, and does not say what; a network maps nothing."""
        mapped = None if self._options.protocol == NVLINK else 0
        return Holding(name, known.memory.regions, known.memory.nbytes, mapped)

    def _connect(self, peer: str, metadata: bytes) -> None:
        """Wait up to ``connect_timeout_s`` for it to answer. Transfers with its predecessor have failed."""
        envelope = unpack(metadata, backend=NAME)
        same_minor_release(self._version, envelope.version, backend=NAME, engine="Mooncake")
        target = parse_target(envelope.blob, self._options.protocol)
        if known := self._peers.get(peer):
            del self._peers[peer]
            self._end_all(f"peer {peer!r} was added anew", lambda work: work.peer is known)
            self._destroy([known.engine])
        engine = connect(self._make(), target, peer, self._options.connect_timeout_s)
        self._peers[peer] = MooncakePeer(metadata, target, RegisteredMemory(envelope.regions), engine)

    def _submit(self, peer: str, descriptors: Descriptors, operation: Operation) -> Transfer:
        """Post what may be under way at a time; `poll` posts the rest. With CUDA IPC lasts as long as the copy."""
        known = self._peers[peer]
        rows = checked(descriptors, self._memory, known.memory, backend=NAME)
        if self._options.protocol == NVLINK:
            return self._copy(known, rows, operation, peer)
        pieces = cut(rows, self._options.piece_bytes)
        work = _Pieces(known, operation, *(c.tolist() for c in (pieces.local, pieces.remote, pieces.length)))
        transfer = self._begin(Transfer(peer, rows.nbytes, len(rows), work))
        known.queue.append(work)
        self._advance(known)
        if work.failed and not work.posted:
            del self._live[work]
            raise TransferRefused(self._reason(transfer, work), backend=NAME, hint=LOG)
        self._note(work, transfer)
        transfer.detail |= {
            "pieces": float(len(pieces)),
            "submit_us": (time.monotonic() - transfer.posted) * 1e6,
        }
        return transfer

    def _look(self, work: _Pieces, transfer: Transfer) -> None:
        """Post what there is room for; never waits, whatever the peer does."""
        self._advance(work.peer)
        self._note(work, transfer)

    def _stop(self, reason: str) -> None:
        self._end_all(reason)
        engines = [known.engine for known in self._peers.values()]
        self._peers.clear()
        self._destroy(engines)

    def _copy(self, peer: MooncakePeer, rows: Descriptors, operation: Operation, name: str) -> Transfer:
        """Copy while the caller waits."""
        work = _Pieces(peer, operation, [], [], [])
        transfer = Transfer(name, rows.nbytes, len(rows), work, posted=time.monotonic())
        for first in range(0, len(rows), COPIED_AT_ONCE):
            part = Descriptors(
                *(c[first : first + COPIED_AT_ONCE] for c in (rows.local, rows.remote, rows.length))
            )
            if not peer.engine.copy(operation, peer.target.session, part):
                work.failed = (
                    f"rows {first} to {first + len(part) - 1} of {len(rows)}: Mooncake gives no reason"
                )
                break
        transfer.detail["submit_us"] = (time.monotonic() - transfer.posted) * 1e6
        self._note(work, transfer)
        return transfer

    def _destroy(self, engines: list[MooncakeEngine]) -> None:
        """Destroy these, and those that were not when they should have been."""
        self._ending += engines
        while self._ending:
            self._ending[-1].destroy()
            self._ending.pop()

    def _advance(self, peer: MooncakePeer) -> None:
        """Take note of the pieces that are over, oldest first, and post others in their place."""
        flying, queue = peer.flying, peer.queue
        while flying:
            number, work, row = flying[0]
            state = peer.engine.status(number)
            if state == WAITING:
                break
            flying.popleft()
            work.over += 1
            if state != COMPLETED:
                self._spoil(work, row, f"Mooncake answered {state} and no reason")
        while queue and len(flying) < self._options.in_flight:
            work, row = queue[0], queue[0].posted
            if work.failed or row == len(work.length):
                queue.popleft()
                continue
            started = peer.engine.post(
                work.operation, peer.target.session, work.local[row], work.remote[row], work.length[row]
            )
            if started is None:
                self._spoil(work, row, "Mooncake did not take it")
                continue
            work.posted += 1
            flying.append((started, work, row))

    @staticmethod
    def _spoil(work: _Pieces, row: int, what: str) -> None:
        """Note the first thing that went wrong."""
        if not work.failed:
            work.failed = (
                f"piece {row + 1} of {len(work.length)}, {work.length[row]} bytes, {work.local[row]:#x} here, "
                f"{work.remote[row]:#x} there: {what}"
            )

    def _note(self, work: _Pieces, transfer: Transfer) -> None:
        if work.failed:
            self._end(transfer, f"{self._reason(transfer, work)}; {LOG}")
        elif work.over == len(work.length):
            self._end(transfer)

    @staticmethod
    def _reason(transfer: Transfer, work: _Pieces) -> str:
        session = work.peer.target.session
        return (
            f"{work.operation} of {transfer.bytes} bytes in {transfer.descriptors} descriptors, peer {transfer.peer} "
            f"at {session}: {work.failed}; {knock(session, _ALIVE)}"
        )
