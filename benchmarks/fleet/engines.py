"""Simulated engines: real sessions of workers and a scheduler at each host's kvd. They move nothing."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.fleet.hosts import Host
from kvctl.bench.handshake import card_of
from kvctl.engines.cards import engine_facts
from kvctl.engines.sources import planned
from kvd.client.session import KvdSession
from kvd.geometry.model import EngineGeometry
from kvd.wire.frame import Message
from kvd.wire.identity import EngineFacts, LeaseKey, Role
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseEnded, LeaseOpened
from kvd.wire.registration import OpenLease, RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok

MODEL = "llama-3.1-8b"
SECONDS = 600.0
"""For anything to happen, by the clock on the wall or a slower one."""
AT_A_TIME = 16


@dataclass
class Engine:
    """One engine on one host; ``worker`` is the incarnation of its first worker.

    ``ended`` has the leases that kvd ended, with the time.monotonic() of it.
    """

    host: Host
    facts: EngineFacts
    worker: str = ""
    sessions: list[KvdSession] = field(default_factory=list)
    ended: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def scheduler(self) -> KvdSession:
        """Its session."""
        return self.sessions[-1]

    def key(self, request: str) -> LeaseKey:
        """What decoders call a lease of it by."""
        return LeaseKey(engine_id=self.facts.engine_id, request_id=request, endpoint=self.host.endpoint)

    def open(self, request: str, seconds: float) -> None:
        """Keep blocks for a request. Raises `SystemExit`."""
        opened = LeaseOpened(engine_id=self.facts.engine_id, leases=(OpenLease(request, seconds, 1, 1),))
        if (answer := self.scheduler.call(opened, SECONDS).result(SECONDS)) != Ok():
            raise SystemExit(f"the kvd of host {self.host.number} opened no lease: {answer}")

    def claim(self, key: LeaseKey, extend_seconds: float) -> LeaseClaimed:
        """Mean to read under another engine's lease. Raises `SystemExit`."""
        claim = LeaseClaim(key=key, reader=uuid.uuid4().hex, extend_seconds=extend_seconds)
        answer = self.scheduler.call(claim, SECONDS).result(SECONDS)
        if not isinstance(answer, LeaseClaimed) or not answer.seconds:
            raise SystemExit(f"the lease {key.request_id} of {key.engine_id} is not to be had: {answer}")
        return answer

    def close(self) -> None:
        """End its sessions; those whose kvd is gone wait for nobody."""
        for session in self.sessions:
            session.close(0.1)

    def _on_push(self, message: Message) -> Message | None:
        if isinstance(message, LeaseEnded):
            self.ended[message.request_id] = message.end, time.monotonic()
        return None


def role_of(number: int) -> Role:
    """Every second host decodes."""
    return "decode" if number % 2 else "prefill"


def registered(hosts: Sequence[Host], workers: int) -> list[Engine]:
    """An engine of ``workers`` ranks on each host, complete and with a scheduler. Raises `TimedOut`."""
    shape = planned(MODEL, f"tp={workers}")
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        return list(threads.map(lambda host: _register(host, shape), hosts))


def _register(host: Host, shape: EngineGeometry) -> Engine:
    name = f"engine-{host.number:04}"
    facts = engine_facts(dataclasses.replace(shape, engine_id=name), role_of(host.number))
    engine = Engine(host, facts)
    for worker in shape.workers:
        card = RegisterWorker(card_of(worker, facts), parts=True)
        engine.worker = engine.worker or card.card.incarnation
        engine.sessions.append(KvdSession(_presents(card), None, directory=host.directory, name=name))
    scheduler = RegisterScheduler(
        engine=facts, incarnation=uuid.uuid4().hex, pid=os.getpid(), digest_key=os.urandom(32)
    )
    engine.sessions.append(
        KvdSession(_presents(scheduler), engine._on_push, directory=host.directory, name=name)  # noqa: SLF001
    )
    for session in engine.sessions:
        session.wait(lambda state: state.connected and bool(state.engine_generation), SECONDS)
    return engine


def _presents(
    card: RegisterWorker | RegisterScheduler,
) -> Callable[[], RegisterWorker | RegisterScheduler]:
    return lambda: card
