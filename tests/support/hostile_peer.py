"""A kvd that answers as it likes: a ROUTER on a port, and cards that no honest kvd would give."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import zmq

from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import DescribeEngine, EngineDescribed, Ping, Pong
from kvd.wire.identity import EngineCard, EngineFacts, WorkerCard
from kvd.wire.names import generation_of
from kvd.wire.query import EngineList, ListEngines

LONG_BLOCK = 10_007
"""Tokens of a block that meet blocks of 16 in ten thousand ways."""


def serve(
    port: int,
    describe: Callable[[DescribeEngine], Message],
    other: Callable[[Message], Message | None] = lambda _: None,
) -> None:
    """Answer pings as a kvd does, questions about engines with what ``describe`` makes, and ``other`` ones; for ever.

    Nothing is said to those for which that has no answer.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        while True:
            route, frame = router.recv_multipart()
            message, correlation = decode(frame)
            answer: Message | None
            if isinstance(message, Ping):
                answer = Pong(kvd_id="hostile", kvd_generation="h")
            elif isinstance(message, ListEngines):
                answer = EngineList(rows=())
            elif isinstance(message, DescribeEngine):
                answer = describe(message)
            else:
                answer = other(message)
            if answer is not None:
                router.send_multipart([route, encode(answer, correlation)])


def card_of(engine_id: str, geometry: bytes, **facts: object) -> EngineCard:
    """The card of an engine with one worker, true but for what its geometry says."""
    engine = msgspec.convert({"engine_id": engine_id, "model": "tiny", **facts}, EngineFacts)
    worker = WorkerCard(
        engine=engine, rank=Rank(), incarnation=f"of {engine_id}", pid=1, host="h", backend="direct",
        geometry=geometry, metadata=b"",
    )  # fmt: skip
    return EngineCard(engine=engine, generation=generation_of([worker.incarnation]), workers=(worker,))


def demanding(layers: int, names: Callable[[int], str]) -> bytes:
    """A geometry that is consistent with itself, and of which each layer takes seconds to plan for blocks of 16."""
    made = []
    for number in range(layers):
        axes = (Axis("head", 0, 1, 1, 4), Axis("token", 0, LONG_BLOCK, 1, 4))
        fields = (Field("k", "float32", 4, 4 * number, axes, (("head", 1), ("token", LONG_BLOCK))),)
        page = Page(4 * (LONG_BLOCK + number), fields)
        made.append(Layer(names(number), page, region=0, offset=0, stride=page.size))
    region = Region(0x10000, 4 * (LONG_BLOCK + layers))
    return encode_worker(WorkerGeometry(Rank(), 1, (region,), (Group(0, "full", LONG_BLOCK, tuple(made)),)))


def demanding_engines(port: int, layers: int) -> None:
    """A kvd all of whose engines take minutes to compare with, by cards of 170 bytes a layer."""
    geometry = demanding(layers, lambda number: f"layer.{number}")
    serve(port, lambda asked: EngineDescribed(card=card_of(asked.engine_id, geometry), kvd_generation="h"))


def lying(port: int, told: EngineDescribed, geometry: bytes) -> None:
    """A kvd whose cards are not true; the engine's id says in what. ``told`` is what another kvd told of its own."""

    def describe(asked: DescribeEngine) -> Message:
        # What is untrue about it, where nothing else is said: its shape.
        card, shape = card_of(asked.engine_id, geometry, facts={"cache_dtype": "another"}), told.shape
        (worker,) = card.workers
        if asked.engine_id == "another engine":
            card = card_of("p", geometry)
        elif asked.engine_id == "another generation":
            card = msgspec.structs.replace(card, generation="0123456789abcdef")
        elif asked.engine_id in ("a rank twice", "a rank missing"):
            engine = msgspec.structs.replace(card.engine, tp=2, world_size=2)
            workers = (worker, worker) if asked.engine_id == "a rank twice" else (worker,)
            generation = generation_of(w.incarnation for w in workers)
            card = EngineCard(engine=engine, generation=generation, workers=workers)
        elif asked.engine_id == "a rank outside":
            card = msgspec.structs.replace(card, workers=(msgspec.structs.replace(worker, rank=Rank(3)),))
        elif asked.engine_id == "a worker of another":
            stranger = msgspec.structs.replace(card.engine, engine_id="p")
            card = msgspec.structs.replace(card, workers=(msgspec.structs.replace(worker, engine=stranger),))
        return EngineDescribed(card=card, kvd_generation="h", shape=shape)

    serve(port, describe)


def too_large_at_first(port: int, size: int, geometry: bytes) -> None:
    """A kvd that answers the first question about an engine with ``size`` bytes, and the others as it should."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asked = 0
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://127.0.0.1:{port}")
        while True:
            route, frame = router.recv_multipart()
            message, correlation = decode(frame)
            if isinstance(message, DescribeEngine):
                asked += 1
                card = card_of(message.engine_id, geometry)
                answer = encode(EngineDescribed(card=card, kvd_generation="h"), correlation)
                router.send_multipart([route, answer if asked > 1 else bytes(size)])
            elif isinstance(message, Ping):
                router.send_multipart([route, encode(Pong(kvd_id="h", kvd_generation="h"), correlation)])
