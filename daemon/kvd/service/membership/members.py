"""The one place that knows which other kvds are members, from whom, and why each still is one.

A source says which kvds to link to. It never says that one is dead: a member that a source does not name any more stays
while its link works. It is forgotten once full answers have lacked it, and its link was down, for some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from kvd.service.background_tasks import BackgroundTasks
from kvd.service.membership.told import (
    MOST_MEMBERS,
    LineKind,
    Lines,
    ToldHost,
    another_key,
    refused,
    shortly,
)
from kvd.service.peers.discovery import LOOK_SECONDS, WRITTEN_DOWN, Looking
from kvd.service.peers.links import PeerLinks
from kvd.service.slices import paced
from kvd.wire.identity import Endpoint
from kvd.wire.query import Membership

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""How often it is looked which members that vanished have a link that is down, and which keys changed."""
FORGET_SECONDS = 10.0
"""How long a member must be missing from the source's answers, with its link down, until it is forgotten."""
AGAIN_SECONDS = 2.0
"""Pause after an error that nobody thought of, in a source or in the look at one member."""
JOINS_A_TURN = 32
"""Members that come or go in one turn of the loop: each has a task, which begins or ends in the next one."""
LOOKS_A_SECOND = 512
"""Members that are looked at in a second. Of more each is looked at less often."""

Discover = Callable[[Endpoint, Looking], Coroutine[Any, Any, None]]


class Taker(Protocol):
    """What a source tells to."""

    def take(self, hosts: Iterable[ToldHost], *, full: bool = True, trouble: str = "") -> None:
        """All that the source names now; ``full``: who is not among them is not there.

        ``trouble``: it cannot be told where this kvd is, so it counts as away.
        """

    def away(self, reason: str) -> None:
        """The source does not answer. All that is known stays."""

    def wrong(self, what: str, kind: LineKind = "value") -> None:
        """The source says something that is no kvd."""


MemberSource = Callable[[Taker], Coroutine[Any, Any, None]]
"""Follows one source until it is cancelled, and tells what it says."""


@dataclass(slots=True)
class SourceState:
    """How the source is: ``waiting`` for its first answer, ``known``, or ``away`` with the reason."""

    state: str = "waiting"
    reason: str = ""
    since: float = field(default_factory=time.monotonic)

    def change(self, state: str, reason: str = "") -> bool:
        """Whether that is another state than before."""
        self.reason = reason
        if self.state == state:
            return False
        self.state, self.since = state, time.monotonic()
        return True


class Members:
    """The other kvds that this one links to and introduces engines of. ``links.kept`` is fed from here alone."""

    def __init__(
        self, source: str, links: PeerLinks, discover: Discover, here: Endpoint, counters: Counter[str]
    ) -> None:
        self.source = source
        self.state = SourceState("known" if source == "static" else "waiting")
        self._links, self._discover, self._here, self._counters = links, discover, here, counters
        self._told: dict[Endpoint, list[ToldHost]] = {}
        self._joined: dict[Endpoint, asyncio.Task[None]] = {}
        self._other_key: dict[Endpoint, str] = {}
        """Who is not linked since the source tells another key than is expected, with that key."""
        self._full = False
        self._ours: set[Endpoint] = set()
        self._refused: set[Endpoint] = set()
        self._taken = asyncio.Event()
        self._missing: dict[Endpoint, float] = {}
        """Who vanished with a link that is down, and since when."""
        self._ending = BackgroundTasks()
        self._lines = Lines(counters)
        self._looking = Looking(False, partial(self._warn, "trust"), self._pause)

    # --- what is known ---

    @property
    def vanished(self) -> list[Endpoint]:
        """Members that the source does not name any more, and that stay since their links work."""
        return [one for one in self._joined if one not in self._told and one not in self._links.written]

    def row(self) -> Membership:
        """The source and its members, for operators."""
        return Membership(
            source=self.source,
            state=self.state.state,
            age=time.monotonic() - self.state.since,
            reason=self.state.reason,
            members=len(self._joined),
            vanished=len(self.vanished),
            other_key=len(self._other_key),
        )

    # --- what the source tells ---

    def take(self, hosts: Iterable[ToldHost], *, full: bool = True, trouble: str = "") -> None:
        """All that the source names now. Who was named before, and is not now, stays until its link is down."""
        told: dict[Endpoint, list[ToldHost]] = {} if full else dict(self._told)
        for endpoint, same in groupby(sorted(hosts, key=_in_order), key=_place):
            told[endpoint] = list(same)
        if len(told) > MOST_MEMBERS:
            self._warn("many", f"{len(told)} kvds are named, of which {MOST_MEMBERS} count")
            first = sorted(told, key=lambda one: one not in self._joined)  # who is linked stays
            told = {one: told[one] for one in first[:MOST_MEMBERS]}
        self._told, self._full = told, full
        self._ours = {one for one in self._ours if one in told}
        self._refused.clear()
        self._counters["membership.answers"] += 1
        if self.state.change("away" if trouble else "known", trouble) and not trouble:
            log.info("membership: %s names %d kvds", self.source, len(told))
        self._taken.set()

    def away(self, reason: str) -> None:
        """The source does not answer. All that is known stays."""
        self._counters["membership.failures"] += 1
        if self.state.change("away", reason):
            log.warning(
                "membership: %s is away, and what is known of other kvds stays: %s", self.source, reason
            )

    def wrong(self, what: str, kind: LineKind = "value") -> None:
        """The source says something that is no kvd."""
        self._counters["membership.refused"] += 1
        self._warn(kind, what)

    # --- who is a member ---

    async def run(self, source: MemberSource | None) -> None:
        """Until cancelled: keep the members, as ``source`` tells of them. Nothing that it does ends this."""
        try:
            for endpoint in self._links.written:
                self._join(endpoint, WRITTEN_DOWN)
            if source is None:
                await asyncio.Event().wait()
            else:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow(source))
                    tasks.create_task(self._check())
        finally:
            for task in self._joined.values():
                task.cancel()
            await asyncio.gather(*self._joined.values(), return_exceptions=True)
            await self._ending.close()

    async def look(self) -> None:
        """Link whom the source names and may be linked, and forget whom it does not and whose link is down.

        A source may name thousands, so others get their turns meanwhile.
        """
        other_key: dict[Endpoint, str] = {}
        async for endpoint in paced(list(self._told), JOINS_A_TURN):
            self._look_at(endpoint, other_key)
        self._other_key = other_key
        if len(self._joined) > (most := self._links.most):
            self._warn(
                "many",
                f"{len(self._joined)} kvds are named, and this one links to {most} at most: the others are not reached."
                " Give each group of engines that use each other a name or cluster of its own",
            )
        await self._forget()

    async def _forget(self) -> None:
        """Forget who vanished and whose link is down, both for some time: a source gets back data that it lost."""
        now, before = time.monotonic(), self._missing
        lost = [one for one in self.vanished if self._full and not self._links.up(one)]
        self._missing = {one: before.get(one, now) for one in lost}
        async for endpoint, since in paced(list(self._missing.items()), JOINS_A_TURN):
            if now - since >= FORGET_SECONDS and endpoint in self._joined and endpoint not in self._told:
                self._leave(endpoint, f"{self.source} does not name it any more, and its link is down")

    def _look_at(self, endpoint: Endpoint, other_key: dict[Endpoint, str]) -> None:
        if endpoint == self._here or endpoint in self._ours or (hosts := self._told.get(endpoint)) is None:
            return
        if endpoint in self._joined:
            if self._links.leads_here(endpoint):
                self._leave(endpoint, "it is this kvd itself")
                self._ours.add(endpoint)
                return
        elif not self._may_join(endpoint):
            return
        if (other := self._another_key(endpoint, hosts)) is not None:
            other_key[endpoint] = other  # who is linked stays: a source ends no link
        elif endpoint not in self._joined:
            self._join(endpoint, self._looking)

    def _may_join(self, endpoint: Endpoint) -> bool:
        if endpoint in self._refused:
            return False
        if why := refused(endpoint, self._here, self._links.expected(endpoint)):
            self._refused.add(endpoint)
            self._warn("place", f"the kvd at {endpoint} is not linked: {why}")
            return False
        if len(self._joined) >= MOST_MEMBERS + len(self._links.written):
            self._warn("many", f"{MOST_MEMBERS} kvds are linked; further ones are left out")
            return False
        return True

    def _another_key(self, endpoint: Endpoint, hosts: list[ToldHost]) -> str | None:
        """The key that the source tells of a host, where another one is expected here. It only keeps hosts out."""
        expected = self._links.expected(endpoint)
        if (other := another_key(hosts, expected)) is not None:
            told, ours = (shortly(key) if key else "no key" for key in (other, expected or ""))
            self._warn(
                "key",
                f"the kvd at {endpoint} has {told} as it says there, and {ours} is expected here: see kvctl keys",
            )
        return other

    def _join(self, endpoint: Endpoint, looking: Looking) -> None:
        self._links.kept.add(endpoint)
        self._joined[endpoint] = asyncio.get_running_loop().create_task(self._stay(endpoint, looking))
        self._counters["membership.joined"] += 1
        if looking is not WRITTEN_DOWN:
            self._lines.tell("joined", f"membership: {self.source} names the kvd at {endpoint}")

    def _leave(self, endpoint: Endpoint, why: str) -> None:
        self._joined.pop(endpoint).cancel()
        if endpoint not in self._links.written:
            self._links.kept.discard(endpoint)
            self._ending.begin(self._links.let_go(endpoint))
        self._counters["membership.forgotten"] += 1
        self._lines.tell("forgotten", f"membership: the kvd at {endpoint} is forgotten: {why}")

    async def _stay(self, endpoint: Endpoint, looking: Looking) -> None:
        while True:
            try:
                await self._discover(endpoint, looking)
            except Exception:
                # Of one member, by what it answers perhaps: were it to end, that host would be looked at no more. The
                # next look begins from nothing.
                self._counters["errors.internal"] += 1
                log.exception("the look at the kvd at %s failed and starts again", endpoint)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _follow(self, source: MemberSource) -> None:
        while True:
            try:
                await source(self)
            except Exception as error:
                # A source may say anything. kvd goes on with what it knows, and follows the source anew.
                self._counters["errors.internal"] += 1
                self.away(f"{type(error).__name__}")
                log.exception("membership: following %s failed and starts again", self.source)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _check(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._taken.wait()
            self._taken.clear()
            await self.look()

    def _warn(self, kind: LineKind, text: str) -> None:
        self._lines.warn(kind, f"membership: {self.source}: {text}")

    def _pause(self) -> float:
        return LOOK_SECONDS * max(1.0, len(self._joined) / LOOKS_A_SECOND)


def _place(host: ToldHost) -> Endpoint:
    return host.endpoint


def _in_order(host: ToldHost) -> tuple[str, int, str]:
    return host.endpoint.host, host.endpoint.port, host.name
