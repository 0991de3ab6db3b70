"""A prefiller's scheduler as far as its leases go: the real table of leases and a real session, no engine."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Self
from uuid import uuid4

from kvd.client.session import KvdSession
from kvd.vllm.scheduler.leases import Leases
from kvd.wire.frame import Message
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseEnded, LeaseOpened
from kvd.wire.registration import RegisterScheduler
from kvd.wire.reply import Ok
from tests.support.daemons import START_SECONDS, Daemon, facts, wait_for


class Lender:
    """Engine ``p`` at a kvd; ``ended`` are the leases that kvd ended, and how, in their order."""

    def __init__(self, kvd: Daemon, engine_id: str = "p") -> None:
        self.kvd, self.engine_id, self.incarnation = kvd, engine_id, uuid4().hex
        self.leases = Leases(grace=5.0)
        self.ended: list[tuple[str, str]] = []
        self.session = KvdSession(self._card, self._on_message, directory=kvd.directory)
        self.session.wait(lambda state: state.connected, START_SECONDS)

    def open(self, request_id: str, seconds: float = 60.0, blocks: int = 3) -> LeaseKey:
        """Keep blocks for a request; what a decoder calls the lease by."""
        self.leases.open(request_id, seconds, blocks, time.monotonic())
        opened = self.leases.opened_message(self.engine_id, request_id, time.monotonic())
        assert self.session.deliver(f"lease {request_id}", opened).result(10) == Ok()
        return LeaseKey(engine_id=self.engine_id, request_id=request_id, endpoint=self.kvd.endpoint)

    def holds(self) -> int:
        """Leases as kvd has them."""
        return self.kvd.engines()[self.engine_id].leases

    def still_holds(self) -> bool:
        """Whether nothing has ended by all that kvd has taken so far: what it sent before it answers comes before."""
        self.session.call(LeaseOpened(engine_id=self.engine_id, leases=()), 10).result(10)
        return not self.ended and self.holds() == 1

    def wait_ended(self, seconds: float = 10.0) -> list[tuple[str, str]]:
        """What ended, as soon as anything did."""
        return wait_for(lambda: list(self.ended), seconds)

    def _card(self) -> RegisterScheduler:
        now = time.monotonic()
        return RegisterScheduler(
            engine=facts(self.engine_id),
            incarnation=self.incarnation,
            pid=os.getpid(),
            leases=self.leases.held(now),
        )

    def _on_message(self, message: Message) -> Message | None:
        if isinstance(message, LeaseEnded):
            self.ended.append((message.request_id, message.end))
        return self.leases.on_message(message, time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.session.close()
