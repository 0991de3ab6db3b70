"""A Mooncake lane: the way to one peer engine, one engine of Mooncake's for each of its workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd.backends.contract import Operation, State, Transfer
from kvd.backends.envelope import unpack
from kvd.backends.errors import PeerMetadataError, TransferRefused
from kvd.backends.mooncake.connect import connect
from kvd.backends.mooncake.engine import COMPLETED, WAITING, Engine, knock
from kvd.backends.mooncake.library import LOG, NAME
from kvd.backends.mooncake.rows import Bounds, checked, cut
from kvd.backends.mooncake.settings import NVLINK, Settings
from kvd.backends.mooncake.target import Target, parse_target
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

COPIED_AT_ONCE = 4096
"""Rows of one call where Mooncake copies while it is called."""
_ALIVE = "the peer refused the address, made no progress for Mooncake's 30 s, or a connection broke"


@dataclass(slots=True, eq=False)
class _Work:
    """What `Transfer.handle` points at: the pieces, how many are posted and over, and what went wrong."""

    peer: _Peer
    operation: Operation
    local: list[int]
    remote: list[int]
    length: list[int]
    posted: int = 0
    over: int = 0
    failed: str = ""


@dataclass(slots=True, eq=False)
class _Peer:
    """One worker of the peer engine, its engine here, the works not yet all posted and the pieces under way."""

    metadata: bytes
    target: Target
    bounds: Bounds
    engine: Engine
    queue: deque[_Work] = field(default_factory=deque)
    flying: deque[tuple[int, _Work, int]] = field(default_factory=deque)


class MooncakeLane:
    """The way to one peer engine. Calls from several threads wait for each other, `close` too.

    With CUDA IPC Mooncake copies while it is called, so a transfer is over when it is submitted. Otherwise a piece
    is a batch of Mooncake's of its own: that is the only kind whose state can be asked without waiting for it.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        regions: Sequence[Region],
        *,
        version: str,
        make: Callable[[], Engine],
        closed: Callable[[MooncakeLane], None],
    ) -> None:
        self.name = name
        self._settings = settings
        self._version = version
        self._bounds = Bounds("local", regions)
        self._make = make
        self._peers: dict[str, _Peer] = {}
        self._ending: list[Engine] = []
        self._live: dict[_Work, Transfer] = {}
        self._open = True
        self._closed = closed
        self._lock = threading.Lock()

    def add(self, peer: str, metadata: bytes) -> None:
        """Make a worker reachable as ``peer``. The same metadata again does nothing, other metadata takes its place.

        Waits up to ``connect_timeout_s`` for it to answer. Transfers with its predecessor have failed.

        Raises:
            PeerMetadataError: not of this backend, of another minor release or protocol of it, or of a process that is
                no more and whose port another one has.
            PeerUnreachable: it does not answer.
        """
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known and known.metadata == metadata:
                return
            envelope = unpack(metadata, backend=NAME)
            _same_release(self._version, envelope.version)
            target = parse_target(envelope.blob, self._settings.protocol)
            if known:
                del self._peers[peer]
                self._fail(known, f"peer {peer!r} was added anew")
                self._destroy([known.engine])
            engine = connect(self._make(), target, peer, self._settings.connect_timeout_s)
            bounds = Bounds(f"peer {peer}'s", envelope.regions)
            self._peers[peer] = _Peer(metadata, target, bounds, engine)

    def submit(self, peer: str, descriptors: Descriptors, operation: Operation = "read") -> Transfer:
        """Post what may be under way at a time; `poll` posts the rest. With CUDA IPC lasts as long as the copy.

        An error before anything was posted is raised; one after that is a FAILED transfer.

        Raises:
            TransferRefused: unknown peer, closed lane, malformed columns, memory that is not registered here or at the
                peer, or Mooncake did not take the first piece.
        """
        with self._lock:
            self._opened()
            known = self._peers.get(peer)
            if known is None:
                raise TransferRefused(f"peer {peer!r} was not added to lane {self.name!r}", backend=NAME)
            rows = checked(descriptors, self._bounds, known.bounds)
            if self._settings.protocol == NVLINK:
                return self._copy(known, rows, operation, peer)
            pieces = cut(rows, self._settings.piece_bytes)
            work = _Work(
                known, operation, *(c.tolist() for c in (pieces.local, pieces.remote, pieces.length))
            )
            transfer = Transfer(peer, rows.nbytes, len(rows), work, posted=time.monotonic())
            self._live[work] = transfer
            known.queue.append(work)
            self._advance(known)
            if work.failed and not work.posted:
                del self._live[work]
                raise TransferRefused(self._reason(transfer, work), backend=NAME, hint=LOG)
            self._look(transfer, work)
            transfer.detail |= {
                "pieces": float(len(pieces)),
                "submit_us": (time.monotonic() - transfer.posted) * 1e6,
            }
            return transfer

    def poll(self, transfer: Transfer) -> State:
        """Look once, post what there is room for, and update ``transfer``. Never waits, whatever the peer does."""
        with self._lock:
            if transfer.state is State.PENDING:
                work = transfer.handle
                if not isinstance(work, _Work) or work not in self._live:
                    self._end(transfer, State.FAILED, f"not a transfer of lane {self.name!r}")
                else:
                    self._advance(work.peer)
                    self._look(transfer, work)
            return transfer.state

    def close(self) -> None:
        """End the lane. When this returns no byte of any of its transfers can land any more. Idempotent.

        Raises:
            BackendError: something outside this backend holds an engine of Mooncake's, so it still lives: treat the
                memory of the lane's transfers as still being written.
        """
        with self._lock:
            self._open = False
            for known in self._peers.values():
                self._fail(known, f"lane {self.name!r} was closed before the transfer ended")
            engines = [known.engine for known in self._peers.values()]
            self._peers.clear()
            self._destroy(engines)
        self._closed(self)

    def _copy(self, peer: _Peer, rows: Descriptors, operation: Operation, name: str) -> Transfer:
        """Copy while the caller waits."""
        work = _Work(peer, operation, [], [], [])
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
        self._look(transfer, work)
        return transfer

    def _destroy(self, engines: list[Engine]) -> None:
        """Destroy these, and those that were not when they should have been."""
        self._ending += engines
        while self._ending:
            self._ending[-1].destroy()
            self._ending.pop()

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"lane {self.name!r} is closed", backend=NAME)

    def _advance(self, peer: _Peer) -> None:
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
        while queue and len(flying) < self._settings.in_flight:
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
    def _spoil(work: _Work, row: int, what: str) -> None:
        """Note the first thing that went wrong."""
        if not work.failed:
            work.failed = (
                f"piece {row + 1} of {len(work.length)}, {work.length[row]} bytes, {work.local[row]:#x} here, "
                f"{work.remote[row]:#x} there: {what}"
            )

    def _look(self, transfer: Transfer, work: _Work) -> None:
        if work.failed:
            self._end(transfer, State.FAILED, f"{self._reason(transfer, work)}; {LOG}")
        elif work.over == len(work.length):
            self._end(transfer, State.DONE, "")

    @staticmethod
    def _reason(transfer: Transfer, work: _Work) -> str:
        session = work.peer.target.session
        return (
            f"{work.operation} of {transfer.bytes} bytes in {transfer.descriptors} descriptors, peer {transfer.peer} "
            f"at {session}: {work.failed}; {knock(session, _ALIVE)}"
        )

    def _fail(self, peer: _Peer, reason: str) -> None:
        for work in [work for work in self._live if work.peer is peer]:
            self._end(self._live[work], State.FAILED, reason)

    def _end(self, transfer: Transfer, state: State, reason: str) -> None:
        self._live.pop(transfer.handle, None)
        transfer.state, transfer.reason, transfer.ended = state, reason, time.monotonic()


def _same_release(here: str, there: str) -> None:
    if here.split(".")[:2] != there.split(".")[:2]:
        raise PeerMetadataError(
            f"metadata is of Mooncake {there} at the peer and this is Mooncake {here}",
            backend=NAME,
            hint="install the same minor release of Mooncake on both hosts",
        )
