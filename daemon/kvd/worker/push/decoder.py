"""A decoding engine as a prefilling worker knows it: its workers, and what this worker supplies of each of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvd.client.cards import engine_geometry
from kvd.client.errors import ClientError
from kvd.geometry.model import WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.errors import UnknownEngine
from kvd.topology.push import LayerPush, plan_push
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineCard
from kvd.wire.push import PushKey
from kvd.worker.cause import Cause, refusal_code
from kvd.worker.session import SessionProtocol

HANDSHAKE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Decoder:
    """One generation of a decoding engine; plans are made when a worker is first asked for."""

    generation: str
    workers: dict[Rank, WorkerGeometry]
    siblings: tuple[WorkerGeometry, ...]
    source: Rank
    _plans: dict[Rank, dict[str, LayerPush]] = field(default_factory=dict)

    @property
    def ranks(self) -> frozenset[Rank]:
        """All its workers."""
        return frozenset(self.workers)

    def plan(self, rank: Rank) -> dict[str, LayerPush]:
        """What this worker supplies of one of the decoder's, by layer. Raises `TopologyError`."""
        if rank not in self.workers:
            raise UnknownEngine(f"it has no worker {rank}, it has {len(self.workers)} others")
        if rank not in self._plans:
            targets = tuple(self.workers.values())
            self._plans[rank] = plan_push(self.workers[rank], targets, self.siblings, self.source)
        return self._plans[rank]


def know_decoder(card: EngineCard, siblings: tuple[WorkerGeometry, ...], source: Rank) -> Decoder:
    """The decoder that a card describes, for worker ``source`` of ``siblings``. Raises `GeometryError`."""
    workers = engine_geometry(card).workers
    by_rank = {w.rank: w for w in workers}
    return Decoder(card.generation, by_rank, siblings, source)


def ask_for_decoder(
    session: SessionProtocol,
    prefiller: str,
    key: PushKey,
    generation: str,
    answered: Callable[[EngineCard | Cause], None],
) -> None:
    """Ask kvd for the decoder of a push; ``answered`` gets its card or the reason, on the session's thread."""

    def look(done: Future[Message]) -> None:
        try:
            answer = done.result()
        except ClientError as error:
            answered(Cause(f"decoder {key.decoder}: {error.message}", refusal_code(error)))
            return
        if isinstance(answer, PeerReady):
            answered(answer.peer)
        else:
            answered(Cause(f"decoder {key.decoder}: kvd answered {type(answer).__name__}", "PEER_REFUSED"))

    session.call(
        GetPeer(
            local_engine=prefiller,
            engine_id=key.decoder,
            endpoint=key.decoder_endpoint,
            generation=generation,
        ),
        HANDSHAKE_SECONDS,
    ).add_done_callback(look)
