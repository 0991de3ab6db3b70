"""The remote engine that a thread works for, as the worker's `TransferTopology` knows it now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.client.cards import CardReader
from kvd.geometry.errors import GeometryError
from kvd.topology.errors import TopologyError
from kvd.topology.transfer_topology import RemoteEngine, TransferTopology
from kvd.wire.card_parts import ToldCard
from kvd.worker.cause import REQUEST_OVER, Cause, from_error
from kvd.worker.load import Load


def register(topology: TransferTopology, card: ToldCard, reader: CardReader) -> RemoteEngine:
    """Register the engine of a card; what stands in it is read when it is first needed. Raises `OwnEngine`.

    ``reader`` has read earlier cards: what this one has in common with them costs nothing again.
    """
    return topology.register_card(
        card.engine.engine_id,
        card.generation,
        lambda: reader.geometry(card),
        lambda: reader.metadata(card),
    )


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """To a thread: another generation of its peer is registered, or none."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """To a thread: make this load a miss, for the reason that it names as ``dropped``, if it has not ended."""

    load: Load

    @property
    def cause(self) -> Cause:
        """Why."""
        return self.load.dropped or REQUEST_OVER


class FollowedPeer:
    """The generation of one remote engine that a thread works with; used by that thread.

    ``remote`` is None where it cannot be used, and ``absent`` then says why. ``generation`` is of what is registered,
    whether it can be used or not.
    """

    def __init__(
        self,
        engine_id: str,
        topology: TransferTopology,
        prepare: Callable[[RemoteEngine], object],
        *,
        role: str = "peer",
    ) -> None:
        """``prepare`` takes of a generation what the thread needs, and raises `GeometryError` or `TopologyError`.

        ``role`` is what messages call the engine.
        """
        self.remote: RemoteEngine | None = None
        self.absent = Cause(f"{role} {engine_id} is not known here", "PEER_REFUSED")
        self._engine_id = engine_id
        self._who = f"{role} {engine_id}"
        self._topology = topology
        self._prepare = prepare
        self._seen: RemoteEngine | None = None

    @property
    def generation(self) -> str:
        """Of the engine as it was last looked up, "" where it is not known."""
        return "" if self._seen is None else self._seen.generation

    @property
    def changed(self) -> bool:
        """Whether another generation is registered than was looked up, or none."""
        return self._topology.find(self._engine_id) is not self._seen

    def parted(self) -> Cause | None:
        """Why the generation that was worked with is over, once; nothing where it is not. Looked up anew."""
        before, now = self._seen, self._topology.find(self._engine_id)
        if before is None or now is before:
            return None
        if now is None or now.generation == before.generation:
            text = f"{self._who} is gone: {before.gone or 'kvd knows it no longer'}"
        else:
            text = f"{self._who} restarted as generation {now.generation}"
        self._seen = self.remote = None
        self.absent = Cause(text, "PEER_GONE")
        return self.absent

    def learned(self) -> bool:
        """Work with the generation that is registered now. Whether it is another one than before."""
        now = self._topology.find(self._engine_id)
        if now is None or now is self._seen:
            return False
        self._seen = now
        try:
            self._prepare(now)
        except (GeometryError, TopologyError) as error:
            self.absent = from_error(error, f"{self._who} does not fit")
        else:
            self.remote = now
        return True

    def of(self, generation: str, what: str) -> RemoteEngine | Cause:
        """The engine if it is of that generation, else why it cannot be had; ``what`` is of the generation."""
        if self.remote is None:
            return self.absent
        if self.remote.generation == generation:
            return self.remote
        now = f"{self._who} is generation {self.remote.generation} now"
        return Cause(f"{now}, {what} of generation {generation}", "PEER_GONE")
