"""A trace of an incident: an hour of a fleet's transfers, in which one prefiller's host crawls for eight minutes."""

from __future__ import annotations

import random

from kvd.trace.model import EngineLine, Header, RecordedTrace, TracedEngine, TransferLine

BEGAN = 1_794_996_000.0
"""2026-11-18 10:00 UTC."""
TRANSFERS = 1_200
CRAWLS = (1_500.0, 1_980.0)
"""Seconds of the hour in which one host does."""
FACTS: dict[str, str | int | float | bool | None] = {
    "vllm_version": "0.32.0",
    "connector_version": "0.1.0",
    "backend": "nixl",
}


def incident(name: str = "") -> RecordedTrace:
    """The trace; ``name`` goes into each id, for ids that try a page."""
    engines = [
        EngineLine(
            engine_id=f"{role}-{n}{name}", generation=f"{n}c0ffee", model="Qwen/Qwen3-32B", tp=4, facts=FACTS
        )
        for role in ("prefill", "decode")
        for n in range(2)
    ]
    return RecordedTrace(
        Header(schema=1, began=BEGAN, written_by="kvd 0.1.0"),
        tuple(TracedEngine(line, None) for line in engines),
        tuple(_transfer(number, name, random.Random(number)) for number in range(TRANSFERS)),
    )


def _transfer(number: int, name: str, chance: random.Random) -> TransferLine:
    at, remote, tokens = number * 3.0, number % 2, 256 << chance.randrange(6)
    crawls = remote == 0 and CRAWLS[0] <= at < CRAWLS[1]
    slower = chance.uniform(30, 200) if crawls else 1.0
    missed = crawls and number % 20 == 0
    stages = {
        "queued": chance.expovariate(1000),
        "handshake": 0.2 if number < 4 else 0.0,
        "plan": 0.0004 + tokens * 2e-8,
        "post": 0.0006 + tokens * 1e-7 * chance.uniform(1, 2),
        "wire": tokens * 2e-6 * chance.uniform(1, 1.6) * slower,
    }
    return TransferLine(
        transfer=f"r{number}@tp{number % 4}",
        request=f"cmpl-{chance.getrandbits(48):012x}-{number}{name}",
        local=2 + number // 2 % 2,
        remote=remote,
        local_rank=f"tp{number % 4}",
        remote_ranks=(f"tp{number % 4}",),
        backend="nixl",
        mode="pull",
        state="miss" if missed else "done",
        code="TOO_LATE" if missed else "",
        at=at,
        tokens=tokens,
        bytes=0 if missed else tokens * 65536,
        descriptors=64 * 4,
        coalesced_descriptors=64,
        stages={**stages, "other": 30.0} if missed else stages,
    )
