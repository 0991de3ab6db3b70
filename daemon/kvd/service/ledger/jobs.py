"""What waits for the ledger's threads: a fair share for each user and for each client, bounded in jobs and in bytes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd.service.errors import RequestRefused


@dataclass(frozen=True, slots=True)
class LedgerClient:
    """Who waits for a job: a client by its route on the local socket, and the user behind it (-1: not known)."""

    route: bytes = b""
    uid: int = -1


NOBODY = LedgerClient()
"""Stands for the daemon itself."""


@dataclass(slots=True, eq=False)
class LedgerJob:
    """Something to do with a database, on a thread of the ledger; ``size`` is what it holds in memory, in bytes.

    A ``ping`` changes nothing: kvd asks whether the thread lives.
    """

    work: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]
    client: LedgerClient = NOBODY
    size: int = 0
    ping: bool = False


@dataclass(frozen=True, slots=True)
class QueueShare:
    """How much may wait at a time."""

    jobs: int
    size: int


@dataclass(slots=True)
class _Waiting:
    """A user's jobs, by client, in the order of their turns."""

    clients: dict[bytes, deque[LedgerJob]] = field(default_factory=dict)
    sizes: dict[bytes, int] = field(default_factory=dict)
    jobs: int = 0
    size: int = 0


class FairQueue:
    """Jobs for one thread. Users take turns, and the clients of each user; nobody waits behind another one's crowd.

    Over its share a client is refused (``KVD-BUSY``), and so is a user; others are not. A client that has nothing
    waiting is never refused for its own size: else a large job could never be done.
    """

    def __init__(self, what: str, client: QueueShare, user: QueueShare) -> None:
        self._what = what
        self._client, self._user = client, user
        self._users: dict[int, _Waiting] = {}
        self._urgent: deque[LedgerJob] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: LedgerJob) -> None:
        """Add a job. Raises `RequestRefused` where its client or its user has too much waiting."""
        with self._changed:
            self._admit(job)
            user = self._users.setdefault(job.client.uid, _Waiting())
            user.clients.setdefault(job.client.route, deque()).append(job)
            user.sizes[job.client.route] = user.sizes.get(job.client.route, 0) + job.size
            user.jobs += 1
            user.size += job.size
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
            while not (self._urgent or self._users or self._closed):
                if (left := ends - time.monotonic()) <= 0:
                    return []
                self._changed.wait(left)
            taken = list(self._urgent)
            self._urgent.clear()
            total = 0
            while self._users and len(taken) < most and total < size:
                taken.append(self._next())
                total += taken[-1].size
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
            return self._closed and not (self._urgent or self._users)

    def _admit(self, job: LedgerJob) -> None:
        user = self._users.get(job.client.uid)
        if user is None:
            return
        client = len(user.clients.get(job.client.route, ()))
        for who, jobs, size, share in (
            ("client", client, user.sizes.get(job.client.route, 0), self._client),
            ("user", user.jobs, user.size, self._user),
        ):
            if jobs and (jobs >= share.jobs or size + job.size > share.size):
                raise RequestRefused(
                    "KVD-BUSY",
                    f"{jobs} {self._what} of this {who} wait for the ledger, {size} bytes: at most {share.jobs}, and"
                    f" {share.size} bytes",
                    hint="wait for their answers, then send it again",
                )

    def _next(self) -> LedgerJob:
        """The first job of the client whose turn it is; its user and it go to the end of their lines."""
        uid, user = next(iter(self._users.items()))
        route, jobs = next(iter(user.clients.items()))
        job = jobs.popleft()
        del self._users[uid], user.clients[route]
        user.jobs -= 1
        user.size -= job.size
        user.sizes[route] -= job.size
        if jobs:
            user.clients[route] = jobs
        else:
            del user.sizes[route]
        if user.clients:
            self._users[uid] = user
        return job
