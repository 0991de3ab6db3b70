"""A kvd's parts in this process, with all the engines and leases that may be, so that its turns alone are measured."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

from kvd.service.config import Config, LeaseSettings, LivenessSettings
from kvd.service.daemon import Daemon
from kvd.service.engines.draining import DrainTable
from kvd.service.engines.leases import LeaseTable
from kvd.service.engines.liveness import Liveness
from kvd.service.engines.local_engine import Client
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.engines.registry import Registry
from kvd.service.loop_monitor import LoopMonitor, event_loop
from kvd.service.peers.subscribers import Subscribers
from kvd.service.permission import Operators
from kvd.service.slices import Slices
from kvd.service.sockets.events import Events
from kvd.wire.identity import Endpoint, EngineFacts
from tests.support.daemons import worker

TURN_SECONDS = 0.020
"""Of the processor's time, since a machine that runs tests gives some of it to others."""


class Host:
    """The parts of a daemon that registrations, leases, drains and questions have to do with."""

    def __init__(self) -> None:
        self.turns = LoopMonitor()
        events = Events(None, Counter())
        self.registry = Registry(events, settled=0.0)
        self.liveness = Liveness(self.registry, LivenessSettings())
        self.outcomes = OutcomeCounts()
        self.leases = LeaseTable(LeaseSettings(), events, self.outcomes, _nothing, _never)
        self.drains = DrainTable(self.leases)
        peers: dict[Any, Any] = {}
        self.daemon = cast(
            "Daemon",
            SimpleNamespace(
                registry=self.registry,
                handshakes=SimpleNamespace(peers=peers),
                drains=self.drains,
                readers=SimpleNamespace(remembered={}),
                events=events,
                counters=events.counters,
                subscribers=Subscribers(),
                leases=self.leases,
                outcomes=self.outcomes,
                slices=Slices(),
                operators=Operators(),
                config=Config(),
                myself=SimpleNamespace(endpoint=Endpoint()),
            ),
        )

    def take(self, engine: EngineFacts, rank: int | None = None, process: int = 1 << 22) -> Client:
        """Register one, as the kernel would show it: of this user, and of a process that cannot be watched."""
        made = uuid4().hex
        if rank is None:
            client = Client("scheduler", engine, made, process, made.encode(), uid=0, process=process)
        else:
            card = worker(engine, rank, made).card
            client = Client(
                "worker",
                engine,
                made,
                process,
                made.encode(),
                rank=card.rank,
                card=card,
                uid=0,
                process=process,
            )
        self.registry.register(client)
        return client

    async def measured(self, work: Awaitable[Any]) -> float:
        """The longest turn, in seconds of the processor's time, while that is done."""
        await asyncio.sleep(0)
        self.turns.busiest = 0.0
        await work
        await asyncio.sleep(0)
        return self.turns.busiest


def _nothing(*_: object) -> None:
    pass


async def _never(*_: object) -> Any:
    raise TimeoutError


@contextmanager
def host() -> Iterator[tuple[Host, Callable[[Awaitable[Any]], Any]]]:
    """A host, and what runs something on its loop."""
    turns = LoopMonitor()
    gc.collect()
    gc.freeze()  # as kvd does once it has started: what pytest and the tests before have made is none of its
    with asyncio.Runner(loop_factory=lambda: event_loop(turns)) as runner:

        async def make() -> Host:
            made = Host()
            made.turns = turns
            return made

        made = runner.run(make())

        async def run(work: Awaitable[Any]) -> Any:
            return await work

        yield made, lambda work: runner.run(run(work))
    gc.unfreeze()
