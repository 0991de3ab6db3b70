"""Who may what on this host, by the user that the kernel names behind a connection."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import pwd
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

log = logging.getLogger(__name__)

REMEMBER_SECONDS = 30.0
"""How long the answer of the system's user database holds: it may be on the network, and a flood asks it once."""
MOST_REMEMBERED = 4096
"""Most users whose membership is remembered; with more it is asked again."""
LOOK_SECONDS = 2.0
"""How long an answer of the system's user database is waited for; without one nobody is a member."""
MOST_LOOKUPS = 16
"""Most users who are looked up at a time, each on a thread: a database that hangs takes no more."""

ReadAccess = Literal["all", "own"]
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
        self._asked: dict[tuple[int, str], asyncio.Future[bool]] = {}

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
        # On a thread: the system's user database may take its time. Once, whoever waits for it.
        asked = self._asked.get(key) or self._ask(key)
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return asked is not None and await asyncio.shield(asked)
        except TimeoutError:
            return False

    async def sight(self, uid: int, read: ReadAccess, group: str) -> Sight:
        """What that user may see."""
        return Sight(uid, read == "all" or await self.has(uid, group))

    def _ask(self, key: tuple[int, str]) -> asyncio.Future[bool] | None:
        if len(self._asked) >= MOST_LOOKUPS:
            return None
        asked = asyncio.get_running_loop().create_future()
        # Not an executor's: the end of kvd would wait for it until the database has given up.
        thread = threading.Thread(target=self._look, args=(key, asked), name="kvd-users", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no thread to be had
            return None
        self._asked[key] = asked
        return asked

    def _look(self, key: tuple[int, str], asked: asyncio.Future[bool]) -> None:
        try:
            member = belongs(*key)
        except OSError as error:
            log.warning("the user database says nothing of uid %s and group %s: %s", *key, error)
            member = False
        with contextlib.suppress(RuntimeError):  # kvd has ended meanwhile
            asked.get_loop().call_soon_threadsafe(partial(self._told, key, asked, member=member))

    def _told(self, key: tuple[int, str], asked: asyncio.Future[bool], *, member: bool) -> None:
        del self._asked[key]
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[key] = member, time.monotonic() + REMEMBER_SECONDS
        if not asked.done():
            asked.set_result(member)


def belongs(uid: int, group: str) -> bool:
    """Whether a user is a member of a group, by the system's user database. Blocks."""
    try:
        user, wanted = pwd.getpwuid(uid), grp.getgrnam(group)
    except KeyError:
        return False
    return wanted.gr_gid in os.getgrouplist(user.pw_name, user.pw_gid)
