"""Who may what on this host, by the user that the kernel names behind a connection."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import time
from dataclasses import dataclass
from typing import Literal

REMEMBER_SECONDS = 30.0
"""How long the answer of the system's user database holds: it may be on the network, and a flood asks it once."""
MOST_REMEMBERED = 4096
"""Most users whose membership is remembered; with more it is asked again."""


Read = Literal["all", "own"]
"""The setting ``access.read``."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What somebody may see: all, or what is of engines of user ``uid``. -1 is nobody, though the kernel said so."""

    uid: int
    everything: bool

    def of(self, owner: int) -> bool:
        """Whether he may see what is of an engine of user ``owner``."""
        return self.everything or 0 <= self.uid == owner


EVERYTHING = Sight(-1, everything=True)
"""What other kvds see, which have a key: it is theirs to say who sees it there."""


class Operators:
    """Who runs this host's kvd: root, kvd's own user, and the members of a group, if one is set."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[bool, float]] = {}
        self._asked: dict[tuple[int, str], asyncio.Task[bool]] = {}

    async def has(self, uid: int, group: str) -> bool:
        """Whether that user is one of them."""
        if uid < 0:
            return False
        if uid in (0, os.geteuid()):
            return True
        if not group:
            return False
        key = uid, group
        member, until = self._known.get(key, (False, 0.0))
        if time.monotonic() < until:
            return member
        if key not in self._asked:
            # On a thread: the system's user database may take its time. Once, whoever waits for it.
            self._asked[key] = asyncio.create_task(self._ask(key))
        return await asyncio.shield(self._asked[key])

    async def sight(self, uid: int, read: Read, group: str) -> Sight:
        """What that user may see."""
        return Sight(uid, read == "all" or await self.has(uid, group))

    async def _ask(self, key: tuple[int, str]) -> bool:
        try:
            member = await asyncio.to_thread(belongs, *key)
        finally:
            del self._asked[key]
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[key] = member, time.monotonic() + REMEMBER_SECONDS
        return member


def belongs(uid: int, group: str) -> bool:
    """Whether a user is a member of a group, by the system's user database. Blocks."""
    try:
        user, wanted = pwd.getpwuid(uid), grp.getgrnam(group)
    except KeyError:
        return False
    return wanted.gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
