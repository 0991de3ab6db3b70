"""A kvd on another host that answers operators as it likes: ever further pages, untrue types, or byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import zmq

from kvd.wire.frame import Message, decode, encode
from kvd.wire.identity import EngineFacts
from kvd.wire.query import EngineRow
from tests.support import raw_zmtp

if TYPE_CHECKING:
    from kvd.geometry.rank import Rank

Answer = Callable[[Message, int], bytes]
"""What is sent for a question with its correlation id: a whole frame."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The place of a kvd that sends ``answer`` for each question."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.PAIR) as told:
        router.linger = told.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        told.bind("inproc://end")

        def serve() -> None:
            with context.socket(zmq.PAIR) as end:
                end.connect("inproc://end")
                poller = zmq.Poller()
                poller.register(router, zmq.POLLIN)
                poller.register(end, zmq.POLLIN)
                while end not in dict(poller.poll()):
                    route, frame = router.recv_multipart()
                    router.send_multipart([route, answer(*decode(frame))])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            told.send(b"")
            thread.join()


@contextmanager
def speaking(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """The place of a kvd that has ``say`` what it likes once it has shaken hands, on each connection in its turn."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    with raw_zmtp.accepted(listening) as made:
                        say(made)
                except OSError:
                    if listening.fileno() < 0 or over.is_set():
                        return

        over = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def engine(name: str, ranks: int = 0) -> EngineRow:
    """A row of an engine that nobody has."""
    # A rank of one byte, which is read as the first: nothing makes more of an answer's bytes.
    short = cast("tuple[Rank, ...]", ((),) * ranks)
    return EngineRow(
        engine=EngineFacts(engine_id=name, model="tiny"), generation="g", local=True, state="ready",
        ranks=short, since=0.0,
    )  # fmt: skip


def plain(answer: Callable[[Message], Message]) -> Answer:
    """Messages in frames of their own, as a kvd sends them."""
    return lambda asked, correlation: encode(answer(asked), correlation)
