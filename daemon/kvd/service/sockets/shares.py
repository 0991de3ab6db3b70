"""Whose requests that wait for something may be how many, of which kind, and of how many bytes."""

from __future__ import annotations

from kvd.service.fairness.budget import ALL, FairShare
from kvd.service.fairness.queue import Path
from kvd.service.sockets.limits import (
    MAX_TASKS,
    MAX_TASKS_CONNECTION,
    MAX_TASKS_KIND,
    MAX_TASKS_PROCESS,
    MAX_TASKS_USER,
    MAX_TASKS_USER_KIND,
    MAX_WAITING_BYTES,
    MAX_WAITING_PROCESS_BYTES,
    MAX_WAITING_USER_BYTES,
)


def shares_of_waiting(route: bytes, path: Path, kind: str) -> tuple[FairShare, ...]:
    """What a request counts in while it waits: a message of that kind, on the connection ``route`` of ``path``.

    A peer's user and process are its key.
    """
    user = path[0]
    return (
        FairShare(("connection", route), "of this connection", MAX_TASKS_CONNECTION),
        FairShare(("process", path), "of this process", MAX_TASKS_PROCESS, MAX_WAITING_PROCESS_BYTES),
        FairShare(("user's kind", user, kind), f"of kind {kind} of this user", MAX_TASKS_USER_KIND),
        FairShare(("kind", kind), f"of kind {kind}", MAX_TASKS_KIND),
        FairShare(("user", user), "of this user", MAX_TASKS_USER, MAX_WAITING_USER_BYTES),
        FairShare(ALL, "in all", MAX_TASKS, MAX_WAITING_BYTES),
    )
