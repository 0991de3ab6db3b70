"""Cards that travel in parts, from a peer that gives as much as it can: what is under way is bounded in bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import pytest

from kvd.geometry.rank import Rank
from kvd.wire.frame import Message
from kvd.wire.handshake import CardPart, CardRow, DescribeEngine, EngineDescribed, GetPeer
from kvd.wire.identity import Endpoint
from tests.support.attacked import assert_unfelled, attacked, attacking
from tests.support.daemons import daemons, facts, session, wait_for, worker
from tests.support.hostile_peer import card_of, serve
from tests.support.ports import free_port

WIDE = "\U0001f600"
ENGINES = 24
"""Engines that are asked for at a time."""
LONG = 60.0


def _row(number: int, text: str, head: bytes = b"", tail: int = 0) -> CardRow:
    return CardRow(Rank(number), f"{number:06}{text}", 1, text, text, head, tail, b"")


def _told(asked: DescribeEngine, part: CardPart, **known: object) -> Message:
    card = msgspec.structs.replace(card_of(asked.engine_id, b"", **known), workers=())
    return EngineDescribed(card=card, kvd_generation="h", part=part)


def wide_rows(port: int) -> None:
    """Rows without geometries, whose names are of wide characters: 65,536 of them."""
    rows = tuple(_row(number, "n" * 500 + WIDE) for number in range(1024))

    def describe(asked: DescribeEngine) -> Message:
        first = asked.first or 0
        return _told(asked, CardPart(first=first, total=65_536, tails=(b"",), rows=rows))

    serve(port, describe)


def tails_of_nobody(port: int) -> None:
    """A worker a part, beside tails that no worker has."""
    tails = (b"", *(bytes([number]) * (1 << 20) for number in range(14)))

    def describe(asked: DescribeEngine) -> Message:
        return _told(
            asked, CardPart(first=asked.first or 0, total=65_536, tails=tails, rows=(_row(0, "name"),))
        )

    serve(port, describe)


def large_facts(port: int) -> None:
    """A worker a part, each with facts of its own of nearly as many bytes as a message may have."""
    known = {f"f{number}": "x" * 16_000 + WIDE for number in range(250)}

    def describe(asked: DescribeEngine) -> Message:
        part = CardPart(first=asked.first or 0, total=65_536, tails=(b"",), rows=(_row(0, "name"),))
        return _told(asked, part, facts=dict(known))

    serve(port, describe)


def one_worker_a_part(port: int) -> None:
    """A card of as many parts as it has workers."""

    def describe(asked: DescribeEngine) -> Message:
        part = CardPart(first=asked.first or 0, total=65_536, tails=(b"",), rows=(_row(0, "name"),))
        return _told(asked, part)

    serve(port, describe)


def one_tail_for_all(port: int) -> None:
    """A tail of 28 KB that stands once in a part and is part of the geometry of each of its 1,024 workers."""
    tails = (b"t" * 28_000,)
    rows = tuple(_row(number, "name") for number in range(1024))

    def describe(asked: DescribeEngine) -> Message:
        return _told(asked, CardPart(first=asked.first or 0, total=2048, tails=tails, rows=rows))

    serve(port, describe)


def many_facts(port: int) -> None:
    """A whole card, of workers that have 256 facts each: 12 million bytes make three million objects."""
    known: dict[str, int] = dict.fromkeys((chr(33 + number) for number in range(256)), 1)

    def describe(asked: DescribeEngine) -> Message:
        card = card_of(asked.engine_id, b"", facts=known)
        return EngineDescribed(
            card=msgspec.structs.replace(card, workers=card.workers * 12_000), kvd_generation="h"
        )

    serve(port, describe)


@pytest.mark.parametrize(
    "peer", [wide_rows, tails_of_nobody, large_facts, one_worker_a_part, one_tail_for_all, many_facts]
)
def test_a_peer_that_gives_large_cards_takes_neither_memory_nor_turns(peer: Callable[[int], None]) -> None:
    port = free_port()
    with ExitStack() as stack:
        (near,) = stack.enter_context(daemons(1))
        stack.enter_context(attacking(peer, port))
        one = stack.enter_context(session(near, worker(facts("d"))))
        one.wait(lambda state: bool(state.engine_generation), LONG)
        with attacked(near) as watch:
            asked = [
                one.call(
                    GetPeer(
                        local_engine="d", engine_id=f"h{n}", endpoint=Endpoint("127.0.0.1", port), first=0
                    ),
                    LONG,
                )
                for n in range(ENGINES)
            ]
            ends = time.monotonic() + 12.0
            for future in asked:
                try:
                    future.exception(max(0.01, ends - time.monotonic()))
                except TimeoutError:
                    break
        assert_unfelled(watch.verdict())
        # And it serves on: an engine of an honest kvd is found.
        (far,) = stack.enter_context(daemons(1))
        stack.enter_context(session(far, worker(facts("p"))))
        wait_for(lambda: far.engines()["p"].state == "ready", LONG)
        honest = GetPeer(local_engine="d", engine_id="p", endpoint=far.endpoint, first=0)
        assert one.call(honest, LONG).exception(LONG) is None
