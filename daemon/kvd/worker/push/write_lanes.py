"""The lanes by which one decoding engine is written to: one for new posts, former ones until their posts have ended.

Ending a lane does not end what it writes: bytes that are on their way land as long as the decoder's window is there.
So a lane is left rather than destroyed under posts of others, and a post that failed or does not end is never said to
be over; only the decoder can end it, by closing its window.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvd.backends.contract import Backend, Lane
from kvd.backends.registry import check_window
from kvd.geometry.rank import Rank
from kvd.topology.descriptors import Descriptors
from kvd.topology.transfer_topology import RemoteEngine
from kvd.wire.agent import HeldPeer
from kvd.worker.peers.held import held_lanes
from kvd.worker.push.target import Post, PushTarget
from kvd.worker.unclosed import Unclosed
from kvd.worker.watchdog import Activity


class WriteLanes:
    """Used by one thread. A lane is made with the first post that needs it."""

    def __init__(self, decoder: str, backend: Backend, kind: str) -> None:
        """``kind`` of backend it is, in the registry."""
        self._decoder = decoder
        self._backend = backend
        self._kind = kind
        self._own: dict[Rank, tuple[RemoteEngine, bytes]] = {}
        """The window of each decoding worker that was last found to be its own."""
        self._lane: Lane | None = None
        self._former: list[Lane] = []
        self._generations: dict[int, str] = {}
        """Of the decoder, by the id of the lane that was made for it."""
        self._unclosed: Unclosed[None] = Unclosed(f"the lane to {decoder}", Activity())

    @property
    def clean(self) -> bool:
        """Whether no lane is left."""
        return self._lane is None and not self._former and not self._unclosed

    @property
    def due(self) -> list[float]:
        """When closing is tried again, in time.monotonic() seconds."""
        return self._unclosed.due

    def post(self, target: PushTarget, rows: Descriptors, layers: dict[str, int], epoch: int) -> Post:
        """Write to a target's window. Raises `BackendError` where it could not be started; nothing moves then."""
        if self._lane is None:
            self._lane = self._backend.lane(self._decoder)
            standing = {id(lane) for lane in self._all()}
            known = {key: which for key, which in self._generations.items() if key in standing}
            self._generations = known | {id(self._lane): target.announce.generations[1]}
        self._lane.add(target.peer, target.announce.window)
        return Post(self._lane.submit(target.peer, rows, "write"), layers, epoch, self._lane)

    def check(self, target: PushTarget, decoder: RemoteEngine) -> None:
        """Refuse a window that is not of the decoding worker, as its card shows that.

        Raises `ForeignWindow` and `PeerMetadataError`, and `TopologyError` where there is no such worker.
        """
        rank, window = target.key.rank, target.announce.window
        if window and self._own.get(rank) != (decoder, window):
            check_window(self._kind, decoder.metadata_of(rank), window)
            self._own[rank] = decoder, window

    def held(self, targets: Collection[PushTarget]) -> list[HeldPeer]:
        """What they hold just now, with what is owed to ``targets``; on any thread."""
        stuck, generations = self._unclosed.things, self._generations
        made = [(generations.get(id(lane), ""), lane) for lane in self._all()]
        return held_lanes(
            self._decoder,
            "writes",
            [one for one in made if one[1] not in stuck],
            [one for one in made if one[1] in stuck],
            loads=len(targets),
            loading_bytes=sum(post.transfer.bytes for target in targets for post in list(target.flying)),
            busy="",
        )

    def leave(self) -> None:
        """New posts take a new lane."""
        if self._lane is not None:
            self._former.append(self._lane)
            self._lane = None

    def sweep(self, flying: Iterable[Post], now: float) -> None:
        """Close former lanes on which nothing of ``flying`` is under way."""
        if self._former:
            used = {id(post.lane) for post in flying}
            over = [lane for lane in self._former if id(lane) not in used]
            self._former = [lane for lane in self._former if id(lane) in used]
            for lane in over:
                if self._unclosed.close(lane):  # its bytes may land until it is
                    self._unclosed.hold(lane)
        self._unclosed.retry_close(now)

    def _all(self) -> list[Lane]:
        now = self._lane
        stuck = [lane for lane in self._unclosed.things if lane is not now]
        return [*([now] if now is not None else []), *self._former, *stuck]  # type: ignore[list-item]
