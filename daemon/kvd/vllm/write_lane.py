"""The lane by which one decoding engine is written to, and what was under way on lanes that are no more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvd.backends.contract import Home, Lane, State, Transfer
from kvd.topology.descriptors import Descriptors
from kvd.vllm.target import Piece, Target, lost

log = logging.getLogger(__name__)

DESTROY_AGAIN = 1.0
"""Seconds before a lane that could not be destroyed is tried again."""
FORMER_SECONDS = 1.0
"""Seconds for which a post of an attempt that is over may end by itself before its lane is destroyed."""


@dataclass(slots=True)
class _Undead:
    """A lane that could not be destroyed; its targets are not quiet before it is."""

    lane: Lane
    targets: list[Target]
    again: float


class WriteLane:
    """One lane at a time, made with the first post; used by one thread.

    ``former`` are posts of attempts that are over: their landing is gone, but their reading has to end.
    """

    def __init__(self, decoder: str, home: Home) -> None:
        self._decoder = decoder
        self._home = home
        self._lane: Lane | None = None
        self._undead: list[_Undead] = []
        self._former: list[tuple[Piece, float]] = []

    @property
    def clean(self) -> bool:
        """Whether no lane is left that could not be destroyed."""
        return not self._undead

    @property
    def former(self) -> list[Transfer]:
        """Posts of attempts that are over and that have not ended."""
        return [piece.transfer for piece, _ in self._former]

    @property
    def dues(self) -> list[float]:
        """When destroying is tried again, in time.monotonic() seconds."""
        return [undead.again for undead in self._undead]

    def holds(self, target: Target) -> bool:
        """Whether something of a target may still be under way on a lane that could not be destroyed."""
        return any(target in undead.targets for undead in self._undead)

    def post(self, target: Target, rows: Descriptors) -> Transfer:
        """Write to a target's landing. Raises `BackendError` where it could not be started."""
        if self._lane is None:
            self._lane = self._home.lane(self._decoder)
        self._lane.add(target.peer, target.announce.landing)
        return self._lane.submit(target.peer, rows, "write")

    def look(self, transfer: Transfer) -> State:
        """The state of a post on the lane of now."""
        if transfer.state is not State.PENDING or self._lane is None:
            return transfer.state
        return self._lane.poll(transfer)

    def leave(self, pieces: Iterable[Piece]) -> None:
        """Nobody waits for these any more."""
        now = time.monotonic()
        self._former += [(piece, now) for piece in pieces]

    def poll_former(self, now: float) -> bool:
        """Look at posts of attempts that are over. True where one does not end and the lane has to go."""
        self._former = [(p, since) for p, since in self._former if self.look(p.transfer) is State.PENDING]
        return any(now > since + FORMER_SECONDS for _, since in self._former)

    def drop(self, targets: Iterable[Target], close: Callable[[Target, str], None]) -> None:
        """Destroy the lane: what was under way on it did not happen, and is posted again where it is still wanted.

        Where it cannot be destroyed, targets with something on it are closed.
        """
        lane, self._lane = self._lane, None
        if lane is None:
            return
        flying = [target for target in targets if target.flying]
        self._former.clear()
        if not self._destroy(lane):
            for target in flying:
                close(target, f"the lane to {self._decoder} could not be destroyed")
            self._undead.append(_Undead(lane, flying, time.monotonic() + DESTROY_AGAIN))
        for target in flying:
            lost(target)

    def bury(self, now: float) -> None:
        """Try again to destroy what could not be destroyed."""
        for undead in [u for u in self._undead if now >= u.again]:
            if self._destroy(undead.lane):
                self._undead.remove(undead)
            else:
                undead.again = time.monotonic() + DESTROY_AGAIN

    def _destroy(self, lane: Lane) -> bool:
        try:
            lane.close()
        except Exception:
            log.exception("lane to %s could not be destroyed; it will be tried again", self._decoder)
            return False
        return True
