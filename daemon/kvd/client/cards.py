"""From an engine's card on the wire to its geometry: the one place where the two meet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from kvd.geometry.alike import AlikeReader, cut
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import EngineGeometry, UntoldWorker, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.wire.card_parts import ToldCard
from kvd.wire.handshake import CardOutline, EngineLayout
from kvd.wire.identity import EngineCard, EngineFacts

LAYOUTS_KEPT = 64
"""Most layouts that a `CardReader` remembers: those used last. One of 64 workers takes some 50 KB."""
_LAYOUT = msgspec.msgpack.Decoder(EngineLayout)


def engine_geometry(
    card: EngineCard, workers: tuple[WorkerGeometry, ...] = (), *, reader: AlikeReader | None = None
) -> EngineGeometry:
    """The geometry of the engine that a card describes. Raises `kvd.geometry.errors.GeometryError` for a bad one.

    ``workers`` are its workers' geometries in the card's order, where they have been read before; ``reader`` may have
    read such of other engines.
    """
    reader = reader or AlikeReader()
    known = workers or tuple(reader.worker(*cut(worker.geometry)) for worker in card.workers)
    return described_engine(msgspec.structs.replace(card.engine, facts=card.facts), card.generation, known)


def described_engine(
    engine: EngineFacts, generation: str, workers: tuple[WorkerGeometry, ...]
) -> EngineGeometry:
    """The engine of which these facts are told, with its workers."""
    return EngineGeometry(
        engine_id=engine.engine_id,
        generation=generation,
        model=engine.model,
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        workers=workers,
        facts=dict(engine.facts),
    )


class _LayoutRead(NamedTuple):
    """A layout that was found good: its workers without addresses, and where each rank stands with its tail."""

    workers: tuple[UntoldWorker, ...]
    places: dict[Rank, tuple[int, bytes]]
    backends: str


class CardReader:
    """Reads cards of peers as kvd tells them. What one has in common with earlier ones costs nothing again.

    Any number of threads may ask.
    """

    def __init__(self, known: Iterable[WorkerGeometry] = ()) -> None:
        """What cards have in common with workers that are ``known`` costs nothing: many peers are like one's own."""
        self._alike = AlikeReader()
        for worker in known:
            self._alike.learn(worker)
        self._layouts: OrderedDict[str, _LayoutRead] = OrderedDict()

    def geometry(self, told: ToldCard) -> EngineGeometry:
        """The geometry of the engine. Of a card in outline all workers but the rows' are an `UntoldWorker`.

        Raises `kvd.geometry.errors.GeometryError` for a bad one.
        """
        if told.outline is None:
            return engine_geometry(told.whole, reader=self._alike)
        layout = self._layout(told.outline)
        workers: list[WorkerGeometry] = list(layout.workers)
        for row in told.outline.rows:
            if row.rank not in layout.places:
                raise BadGeometry(f"a card tells of worker {row.rank}, its layout has {len(workers)} others")
            at, tail = layout.places[row.rank]
            workers[at] = self._alike.worker(row.head, tail)
            if workers[at].rank != row.rank:
                raise BadGeometry(f"the card says rank {row.rank}, its geometry says {workers[at].rank}")
        facts = {**told.engine.facts, "backend": layout.backends}
        engine = msgspec.structs.replace(told.engine, facts=facts)
        return described_engine(engine, told.generation, tuple(workers))

    def metadata(self, told: ToldCard) -> dict[Rank, bytes]:
        """What the workers exported of which that was told."""
        workers = told.whole.workers if told.outline is None else told.outline.rows
        return {worker.rank: worker.metadata for worker in workers}

    def _layout(self, outline: CardOutline) -> _LayoutRead:
        if (known := self._layouts.get(outline.shape)) is not None:
            self._layouts.move_to_end(outline.shape)
        else:
            known = self._layouts[outline.shape] = self._read_layout(outline.layout)
            if len(self._layouts) > LAYOUTS_KEPT:
                self._layouts.popitem(last=False)
        return known

    def _read_layout(self, data: bytes) -> _LayoutRead:
        try:
            layout = _LAYOUT.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadGeometry(f"not the layout of an engine: {error}") from None
        ranks = layout.ranks
        if len(layout.of) != len(ranks) or len(set(ranks)) != len(ranks) or not ranks:
            raise BadGeometry(
                f"a layout of {len(set(ranks))} workers names {len(ranks)} ranks and the kinds of {len(layout.of)}"
            )
        if max(layout.of) >= len(layout.kinds):
            raise BadGeometry(f"a layout names kind {max(layout.of)} of {len(layout.kinds)}")
        read = [self._alike.worker(kind.head, kind.tail) for kind in layout.kinds]
        kinds = [read[kind] for kind in layout.of]
        return _LayoutRead(
            tuple(
                UntoldWorker(rank, one.num_blocks, (), one.groups)
                for rank, one in zip(ranks, kinds, strict=True)
            ),
            {rank: (at, layout.kinds[layout.of[at]].tail) for at, rank in enumerate(ranks)},
            ",".join(sorted({kind.backend for kind in layout.kinds})),
        )
