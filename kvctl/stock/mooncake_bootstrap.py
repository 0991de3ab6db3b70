"""The bootstrap server of a stock MooncakeConnector: which workers of which engines have registered.

``GET /query`` answers with ``{data parallel rank: {engine_id, worker_addr: {tensor rank: {pipeline rank: address}}}}``.
It tells nothing of their KV caches: workers exchange that with each pull.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvctl.stock.bounded import StockGarbage, connected

SECONDS = 5.0
_RANKS = Meta(max_length=4096)


class RegisteredWorkers(Struct, frozen=True):
    """One engine's workers, by tensor and by pipeline rank."""

    engine_id: Annotated[str, Meta(max_length=512)]
    worker_addr: Annotated[
        dict[str, Annotated[dict[str, Annotated[str, Meta(max_length=512)]], _RANKS]], _RANKS
    ]


@dataclass(frozen=True, slots=True)
class RegisteredEngine:
    """One data parallel rank of what registered; ``workers`` are addresses by (pipeline rank, tensor rank)."""

    engine_id: str
    dp: int
    workers: dict[tuple[int, int], str]

    @property
    def tp(self) -> int:
        """The least tensor parallel size that has all of them."""
        return 1 + max((tp for _, tp in self.workers), default=-1)

    @property
    def pp(self) -> int:
        """The least pipeline parallel size that has all of them."""
        return 1 + max((pp for pp, _ in self.workers), default=-1)

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """(pipeline rank, tensor rank) of workers that these sizes have and that did not register."""
        ranks = ((pp, tp) for pp in range(self.pp) for tp in range(self.tp))
        return tuple(rank for rank in ranks if rank not in self.workers)


@dataclass(frozen=True, slots=True)
class BootstrapAnswer:
    """What a bootstrap server answered, and how long that took."""

    engines: tuple[RegisteredEngine, ...]
    seconds: float


def query(host: str, port: int, *, seconds: float = SECONDS) -> BootstrapAnswer:
    """Ask who has registered. Raises `StockUnreachable`, `StockSilent` and `StockGarbage`."""
    began = time.perf_counter()
    with connected(host, port, seconds) as line:
        line.write(f"GET /query HTTP/1.0\r\nHost: {line.where}\r\nAccept: application/json\r\n\r\n".encode())
        head, _, body = line.rest().partition(b"\r\n\r\n")
        where = line.where
    status = head.split(b"\r\n", 1)[0]
    words = status.split()
    if not status.startswith(b"HTTP/") or len(words) < 2 or words[1] != b"200":
        raise StockGarbage(
            f"{where} answers GET /query with {status[:60]!r} and not with the workers that registered",
            "is that the port of Mooncake's bootstrap server? VLLM_MOONCAKE_BOOTSTRAP_PORT, 8998",
        )
    try:
        told = msgspec.json.decode(body, type=Annotated[dict[str, RegisteredWorkers], _RANKS])
        engines = tuple(_engines(told))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StockGarbage(
            f"{where} answers GET /query with what is no list of Mooncake's workers: {error}"
        ) from None
    return BootstrapAnswer(engines, time.perf_counter() - began)


def _engines(told: dict[str, RegisteredWorkers]) -> Iterator[RegisteredEngine]:
    for dp, engine in sorted(told.items(), key=lambda item: _rank(item[0])):
        workers = {
            (_rank(pp), _rank(tp)): address
            for tp, stages in engine.worker_addr.items()
            for pp, address in stages.items()
        }
        yield RegisteredEngine(engine.engine_id, _rank(dp), workers)


def _rank(text: str) -> int:
    if not text.isdecimal() or int(text) > 4095:
        raise ValueError(f"{text[:20]!r} is no rank")
    return int(text)
