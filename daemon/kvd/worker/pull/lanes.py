"""The lanes to one peer engine that is read from: the one of now, and former ones that could not be closed."""

from __future__ import annotations

from kvd.backends.contract import Backend, Lane, State, orders_streams
from kvd.backends.errors import BackendError
from kvd.topology.transfer_topology import RemoteEngine
from kvd.wire.agent import HeldPeer
from kvd.worker.cause import Cause
from kvd.worker.load import Load, overdue, state_of
from kvd.worker.peers.followed import FollowedPeer
from kvd.worker.peers.held import HeldLane, held_lanes
from kvd.worker.unclosed import Unclosed
from kvd.worker.watchdog import Activity


class ReadLanes:
    """Used by one thread, but for what says otherwise and ``unclosed``.

    ``activity`` is told what it does in the backend.
    """

    def __init__(self, engine_id: str, backend: Backend, activity: Activity) -> None:
        self._engine_id = engine_id
        self._backend = backend
        self._activity = activity
        self._made: list[HeldLane] = []
        self.now: Lane | None = None
        self.pace = 0.0
        """Seconds on the device for a token, of the last load on this lane that was long enough to tell; else 0."""
        self.unclosed: Unclosed[tuple[Load, Cause | None]] = Unclosed(f"the lane to {engine_id}", activity)

    @property
    def generation(self) -> str:
        """Of the peer that the lane of now goes to, empty where there is none."""
        now, made = self.now, self._made  # on any thread
        return next((generation for generation, lane in made if lane is now), "")

    def open(self, peer: FollowedPeer) -> Lane:
        """See that there is a lane to the peer. Raises `BackendError` where none can be made, or to nobody."""
        if self.now is None:
            if peer.remote is None:
                raise BackendError(str(peer.absent))
            with self._activity("connecting"):
                self.now = self._connect(peer.remote)
        return self.now

    def close(self) -> tuple[Lane, str] | None:
        """Close the lane of now. The lane and why it still stands, or None when nothing of it can land any more."""
        lane, self.now, self.pace = self.now, None, 0.0
        if lane is not None and (error := self._close(lane)):
            return lane, error
        return None

    def retry_close(self, now: float) -> list[tuple[Load, Cause | None]]:
        """Close what could not be closed before and is due; gives the loads that need not wait for it any more."""
        freed = self.unclosed.retry_close(now)
        stuck = self.unclosed.things
        self._made = [one for one in self._made if one[1] is self.now or one[1] in stuck]
        return freed

    # --- for steps that run behind a load; on any thread ---

    def orders_streams(self, generation: str) -> bool:
        """Whether the device can be told now to do something after a read from that generation."""
        return orders_streams(self.now) and self.generation == generation and not self.unclosed

    def precede(self, load: Load, stream: int) -> bool:
        """Have what is queued on a stream of the device run after what was posted of a load. Raises `BackendError`.

        False where that cannot be: its lane is gone, or is one that orders no streams.
        """
        if not orders_streams(lane := self.now):
            return False
        for transfer in load.pieces.transfers:
            lane.precede(transfer, stream)
        return True

    def landed(self, load: Load) -> bool:
        """Whether all of a load that is posted is here, in time."""
        lane, transfers = self.now, load.pieces.transfers
        if lane is None or not transfers or not load.under_way.is_set():
            return False
        here = all(state_of(transfer, lane) is State.DONE for transfer in transfers)
        return here and overdue(load, "complete") is None

    # --- for people ---

    def held(self, *, loads: int, loading_bytes: int) -> list[HeldPeer]:
        """What they hold just now, with what is under way; on any thread."""
        made, stuck = self._made, self.unclosed.things
        return held_lanes(
            self._engine_id,
            "reads",
            [one for one in made if one[1] not in stuck],
            [one for one in made if one[1] in stuck],
            loads=loads,
            loading_bytes=loading_bytes,
            busy=self._activity.now,
        )

    def _connect(self, remote: RemoteEngine) -> Lane:
        """A lane to all workers that the plan reads from; half a lane is none, and is closed."""
        lane = self._backend.lane(self._engine_id)
        self._made = [*self._made, (remote.generation, lane)]
        try:
            for rank, metadata in remote.handshake_targets.items():
                lane.add(str(rank), metadata)
        except Exception:  # whatever it is goes on to the caller
            if self._close(lane):
                self.unclosed.hold(lane)
            raise
        return lane

    def _close(self, lane: Lane) -> str:
        error = self.unclosed.close(lane)
        if not error:
            self._made = [one for one in self._made if one[1] is not lane]
        return error
