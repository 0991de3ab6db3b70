"""A card in parts, since that of a large engine is larger than one message may be; and a card in outline."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvd.geometry.alike import cut
from kvd.wire.errors import BadCard
from kvd.wire.handshake import PART_WORKERS, CardOutline, CardPart, CardRow
from kvd.wire.identity import EngineCard, EngineFacts, WorkerCard
from kvd.wire.limits import MOST_RANKS

ROW_BYTES = 128
"""About as much a worker takes besides its geometry, its metadata and the name of its host."""
PART_BYTES = 1 << 20
"""A part ends with the worker that reaches this. Encoding and decoding it takes some milliseconds."""
MAX_CARD_BYTES = 64 << 20
"""Most bytes of a card when its parts are put together. 4,096 workers of 80 layers have 23 MB, and 51 MB where each
layer is a region of its own."""
OBJECT_BYTES = 512
"""About what the objects of a worker take in memory besides what stands in its fields."""
FACTS_BYTES, FACT_BYTES = 512, 128
"""What the facts of an engine, and each of them, take besides their texts."""
_NO_TEXT, _NO_BYTES = sys.getsizeof(""), sys.getsizeof(b"")


def part_from(card: EngineCard, first: int, limit: int = PART_BYTES) -> CardPart:
    """The part of a card from worker ``first`` on, of about ``limit`` bytes; at least one worker."""
    tails: dict[bytes, int] = {}
    rows: list[CardRow] = []
    size = 0
    for worker in card.workers[first : first + PART_WORKERS]:
        head, tail = cut(worker.geometry)
        if tail not in tails:
            tails[tail] = len(tails)
            size += len(tail)
        size += len(head) + len(worker.metadata) + len(worker.host) + ROW_BYTES
        rows.append(_row(worker, head, tails[tail]))
        if size >= limit:
            break
    return CardPart(first=first, total=len(card.workers), tails=tuple(tails), rows=tuple(rows))


def outlined(card: EngineCard, shape: str, layout: bytes, partners: Iterable[int]) -> CardOutline | None:
    """The card of an engine of that shape and layout, for a worker with these ``partners``, by their positions.

    None where it is larger than a part is.
    """
    rows = tuple(_row(card.workers[at], cut(card.workers[at].geometry)[0], 0) for at in partners)
    if len(layout) + sum(map(_row_bytes, rows)) > PART_BYTES:
        return None
    return CardOutline(shape=shape, layout=layout, rows=rows)


def card_bytes(card: EngineCard) -> int:
    """About as many bytes as a card takes in one message."""
    facts = len(msgspec.msgpack.encode(card.engine))
    return facts + sum(len(w.geometry) + len(w.metadata) + len(w.host) + facts + 256 for w in card.workers)


def part_bytes(part: CardPart) -> int:
    """About as many bytes as a part takes in a message."""
    return sum(map(_row_bytes, part.rows)) + sum(map(len, part.tails)) + 4096


def text_bytes(texts: Iterable[str]) -> int:
    """What texts take in memory besides their objects: one wide character makes each of a text's take four bytes."""
    return sum(sys.getsizeof(text) - _NO_TEXT for text in texts)


def facts_bytes(engine: EngineFacts) -> int:
    """About what an engine's facts take in memory."""
    texts = [engine.engine_id, engine.model, *engine.facts]
    texts += [value for value in engine.facts.values() if isinstance(value, str)]
    return FACTS_BYTES + FACT_BYTES * len(engine.facts) + text_bytes(texts)


def kept_bytes(card: EngineCard) -> int:
    """About what a card takes in memory. Its workers have their facts in common."""
    return facts_bytes(card.engine) + sum(
        OBJECT_BYTES + len(w.geometry) + len(w.metadata) + text_bytes((w.incarnation, w.host, w.backend))
        for w in card.workers
    )


class Gathering:
    """The parts of a card as they come in, in their order."""

    def __init__(self) -> None:
        self.count = 0
        """Workers that are here."""
        self.bytes = 0
        """What the card takes in memory when it is put together."""
        self.kept = 0
        """What its parts take until then: what workers share is there once in each."""
        self._engine: EngineFacts | None = None
        self._parts: deque[CardPart] = deque()

    @property
    def workers(self) -> list[WorkerCard]:
        """The workers that are here, made anew each time."""
        return (
            [] if self._engine is None else [w for part in self._parts for w in _workers(self._engine, part)]
        )

    def taken_apart(self) -> Iterator[WorkerCard]:
        """The workers that are here, one by one, for whoever has other work in between. Each part goes with its last.

        Workers of one host have its name in common.
        """
        texts: dict[str, str] = {}
        while self._parts and self._engine is not None:
            yield from _workers(self._engine, self._parts.popleft(), texts)

    def add(self, engine: EngineFacts, part: CardPart) -> bool:
        """Take a part; whether it was the last. The card's facts are those that its first part came with.

        Raises `BadCard`.
        """
        if part.first != self.count:
            raise BadCard(f"a part begins with worker {part.first}, wanted was {self.count}")
        if part.total > MOST_RANKS:
            raise BadCard(f"an engine of {part.total} workers, at most {MOST_RANKS} are taken")
        if not part.rows and part.next < part.total:
            raise BadCard(f"a part without workers, and {part.total - part.next} of {part.total} are missing")
        if part.next > part.total:
            raise BadCard(f"{part.next} workers of an engine of {part.total}")
        if self._engine is None:
            self._engine = engine
            self.kept = self.bytes = facts_bytes(engine)
        sizes = [len(tail) for tail in part.tails]
        for row in part.rows:
            if not 0 <= row.tail < len(sizes):
                raise BadCard(f"worker {row.rank} names tail {row.tail} of {len(sizes)}")
            own = OBJECT_BYTES + len(row.head) + len(row.metadata)
            own += text_bytes((row.incarnation, row.host, row.backend))
            self.bytes += own + sizes[row.tail]
            self.kept += own
        if unused := set(range(len(sizes))).difference(row.tail for row in part.rows):
            raise BadCard(f"tail {min(unused)} of {len(sizes)} is no worker's")
        self.kept += sum(sizes) + _NO_BYTES * len(sizes)
        if self.bytes > MAX_CARD_BYTES:
            raise BadCard(f"a card of more than {self.bytes} bytes, at most {MAX_CARD_BYTES} are taken")
        self._parts.append(part)
        self.count = part.next
        return part.next == part.total


class ToldCard:
    """A card as kvd told it: whose it is can be seen, its workers are made when somebody first asks for them."""

    def __init__(
        self, card: EngineCard, parts: Gathering | None = None, outline: CardOutline | None = None
    ) -> None:
        """With ``parts`` or an ``outline`` the card's workers are there; an outline does not have all of them."""
        self.engine, self.generation, self.outline = card.engine, card.generation, outline
        self._card, self._parts = card, parts

    @property
    def whole(self) -> EngineCard:
        """The card with its workers; without any where kvd told an outline of it."""
        if (parts := self._parts) is not None:
            self._card = with_workers(self._card, parts.workers)
            self._parts = None
        return self._card


def with_facts_in_common(card: EngineCard) -> EngineCard:
    """The card with one object for the facts of all its workers, which say the same of them."""
    replace = msgspec.structs.replace
    return replace(card, workers=tuple(replace(worker, engine=card.engine) for worker in card.workers))


def with_workers(card: EngineCard, workers: Sequence[WorkerCard]) -> EngineCard:
    """The card with these workers."""
    return msgspec.structs.replace(card, workers=tuple(workers))


def _row(worker: WorkerCard, head: bytes, tail: int) -> CardRow:
    return CardRow(
        worker.rank, worker.incarnation, worker.pid, worker.host, worker.backend, head, tail, worker.metadata
    )


def _row_bytes(row: CardRow) -> int:
    return len(row.head) + len(row.metadata) + len(row.host) + ROW_BYTES


def _workers(
    engine: EngineFacts, part: CardPart, texts: dict[str, str] | None = None
) -> Iterator[WorkerCard]:
    """The workers of a part. With ``texts`` those of them that are alike become one object."""
    shared = {} if texts is None else texts
    for row in part.rows:
        yield WorkerCard(
            engine=engine,
            rank=row.rank,
            incarnation=row.incarnation,
            pid=row.pid,
            host=shared.setdefault(row.host, row.host),
            backend=shared.setdefault(row.backend, row.backend),
            geometry=row.head + part.tails[row.tail],
            metadata=row.metadata,
        )
