"""Handshakes with a stock connector, one after the other: does it answer, how fast, and is it the same engine still?"""

from __future__ import annotations

from dataclasses import dataclass

from kvctl.engines.stock import StockAddress
from kvctl.errors import KvctlError
from kvctl.stock import mooncake_bootstrap, side_channel
from kvctl.stock.nixl_metadata import decode


@dataclass(frozen=True, slots=True)
class ProbedListener:
    """How long each answer took, in seconds; the (engine id, incarnation) that answered; what ended it early."""

    seconds: tuple[float, ...]
    engines: tuple[tuple[str, str], ...]
    error: KvctlError | None = None


def probed(address: StockAddress, count: int, timeout: float) -> ProbedListener:
    """Ask ``count`` times for what exists for certain. Never raises `KvctlError`: it stops at the first."""
    took: list[float] = []
    seen: dict[tuple[str, str], None] = {}
    payload, named = b"", ("", "")
    try:
        for _ in range(count):
            if address.scheme == "mooncake":
                answer = mooncake_bootstrap.query(address.host, address.port, seconds=timeout)
                took.append(answer.seconds)
                seen |= {(engine.engine_id, ""): None for engine in answer.engines}
                continue
            told = side_channel.ask(address.host, address.port, seconds=timeout)
            if told.payload != payload:  # decoded once: a listener sends the same bytes each time
                worker = decode(told.payload, address.text)
                payload, named = told.payload, (worker.metadata.engine_id, worker.incarnation)
            took.append(told.seconds)
            seen[named] = None
    except KvctlError as error:
        return ProbedListener(tuple(took), tuple(seen), error)
    return ProbedListener(tuple(took), tuple(seen))
