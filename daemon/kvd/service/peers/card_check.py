"""Whether a peer's card can be true: it is about the engine that was asked for, and agrees with itself.

Geometries are read elsewhere (`kvd.service.peers.comparer.process`): that takes time, and this is done on the loop.
"""

from __future__ import annotations

from kvd.service.errors import RequestRefused
from kvd.wire.identity import EngineCard
from kvd.wire.names import generation_of

HINT = "the kvd there is of another version, or not honest: look at its log, and at `kvctl engines` there"


def check_card(card: EngineCard, engine_id: str, where: str) -> None:
    """Raise `RequestRefused` (KVD-PEER-CARD) unless the card is one of a complete engine ``engine_id``; names both."""
    engine, workers = card.engine, card.workers
    if engine.engine_id != engine_id:
        raise _refused(where, f"asked for engine {engine_id!r}, got the card of {engine.engine_id!r}")
    who = f"engine {engine_id!r}"
    if len(workers) != engine.world_size:
        raise _refused(
            where, f"{who} has {engine.world_size} workers by its facts and {len(workers)} by its card"
        )
    seen = set()
    for worker in workers:
        rank = worker.rank
        if worker.engine.engine_id != engine_id:
            raise _refused(
                where, f"worker {rank} of {who} says that it is one of {worker.engine.engine_id!r}"
            )
        inside = 0 <= rank.tp < engine.tp and 0 <= rank.pp < engine.pp and 0 <= rank.dcp < engine.dcp
        if not inside:
            raise _refused(
                where, f"{who} has worker {rank}, and tp {engine.tp}, pp {engine.pp}, dcp {engine.dcp}"
            )
        if rank in seen:
            raise _refused(where, f"{who} has worker {rank} twice among {len(workers)} workers")
        seen.add(rank)
    incarnations = [worker.incarnation for worker in workers]
    if (made := generation_of(incarnations)) != card.generation:
        raise _refused(
            where, f"{who} is generation {card.generation!r} by its card and {made!r} by its workers"
        )


def _refused(where: str, what: str) -> RequestRefused:
    return RequestRefused("KVD-PEER-CARD", f"{where} gave a card that cannot be true: {what}", hint=HINT)
