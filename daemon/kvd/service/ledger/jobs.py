"""What waits for the ledger's threads, in fair turns, with a bound on how many jobs each user and each client has.

Their bytes are those of the requests that wait for them, and bounded there (`kvd.service.sockets.shares`).
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd.service.errors import RequestRefused
from kvd.service.fairness.budget import Budget, FairShare
from kvd.service.fairness.queue import FairQueue


@dataclass(frozen=True, slots=True)
class LedgerClient:
    """Who waits for a job: a client by its route, and the user behind it (-1: not known) or the key of its host."""

    route: bytes = b""
    uid: int = -1
    key: bytes = b""


NOBODY = LedgerClient()
"""Stands for the daemon itself."""


@dataclass(slots=True, eq=False)
class LedgerJob:
    """Something to do with a database, on a thread of the ledger; ``size`` is about what it writes, in bytes.

    A ``ping`` changes nothing: kvd asks whether the thread lives.
    """

    work: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]
    client: LedgerClient = NOBODY
    size: int = 0
    ping: bool = False


class JobQueue:
    """Jobs for one thread. Users take turns, and the clients of each user; nobody waits behind another one's crowd.

    Over its share a client is refused (``KVD-BUSY``), and so is a user; others are not.
    """

    def __init__(self, what: str, most_of_client: int, most_of_user: int) -> None:
        self._of_client, self._of_user = most_of_client, most_of_user
        self._budget = Budget(what, "bytes")
        self._jobs: FairQueue[LedgerJob] = FairQueue()
        self._urgent: deque[LedgerJob] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: LedgerJob) -> None:
        """Add a job. Raises `RequestRefused` where its client or its user has too much waiting."""
        with self._changed:
            shares = self._shares(job.client)
            if full := self._budget.full(shares):
                raise RequestRefused("KVD-BUSY", full, hint="wait for their answers, then send it again")
            self._budget.take(shares)
            self._jobs.put(((job.client.uid, job.client.key), job.client.route), job)
            self._changed.notify()

    def put_first(self, job: LedgerJob) -> None:
        """Add a job of kvd's own that waits behind nothing."""
        with self._changed:
            self._urgent.append(job)
            self._changed.notify()

    def take(self, most: int, size: int, timeout: float) -> list[LedgerJob]:
        """What is next: ``most`` jobs and about ``size`` bytes, none after ``timeout`` seconds without any."""
        ends = time.monotonic() + timeout
        with self._changed:
            while not (self._urgent or self._jobs or self._closed):
                if (left := ends - time.monotonic()) <= 0:
                    return []
                self._changed.wait(left)
            taken = list(self._urgent)
            self._urgent.clear()
            total = 0
            while len(taken) < most and total < size and (job := self._jobs.take()) is not None:
                taken.append(job)
                total += job.size
                self._budget.give_back(self._shares(job.client))
            return taken

    def take_urgent(self) -> list[LedgerJob]:
        """The jobs of `put_first` alone; never waits."""
        with self._changed:
            taken = list(self._urgent)
            self._urgent.clear()
            return taken

    def close(self) -> None:
        """Nothing more comes; `take` waits for nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Whether it is closed, and empty."""
        with self._changed:
            return self._closed and not (self._urgent or self._jobs)

    def _shares(self, client: LedgerClient) -> tuple[FairShare, FairShare]:
        return (
            FairShare(("client", client.route), "of this client", self._of_client),
            FairShare(("user", client.uid, client.key), "of this user", self._of_user),
        )
