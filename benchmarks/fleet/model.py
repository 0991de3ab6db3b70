"""A fleet as a discrete model: one kvd among many that are like it, fed with the costs of real ones.

A kvd has one event loop, so it is one server with a queue: each message takes it as long as it took a real kvd. Pings,
looks and what follows from a death come when the code lets them come (`kvd.service.peers.link`, `discovery`). Engines
of half of the peers are used, whose links are pinged each second; the others share their pings. What another kvd needs
to answer is taken to be what this one needs at that moment. How far the word of a silent host has got among the others
is a logistic curve: each exchange of two kvds takes it on. There is no network: it would add its round trip to each
answer. Each kvd has one processor of the speed of the one that was measured.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import msgspec

from benchmarks.fleet.costs import Costs
from kvd.service.config import PeerSettings
from kvd.service.membership.members import LOOKS_A_SECOND
from kvd.service.peers.discovery import LOOK_SECONDS, SETTLED_LOOKS
from kvd.service.peers.link import PAUSE_SECONDS
from kvd.service.peers.links import LONGEST_QUIET_SECONDS, QUIET_PINGS_A_SECOND
from kvd.service.sockets.limits import MAX_LINKS

SETTINGS = PeerSettings()
OBSERVERS = 3
"""Kvds that are looked at; more would see the same."""
SETTLE = 4.0
"""Seconds before hosts die."""
AFTER = 8.0
"""And after that. A queue that still grows then has no end."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of so many hosts, each linked to ``peers`` others. Of one host and for each second, where it says so.

    ``processor`` over 1 is more than a kvd has: what follows then is of a kvd that is ever later.
    """

    hosts: int
    peers: int
    workers: int
    processor: float
    messages: float
    bytes: float
    fleet_messages: float
    memory: float
    warm: float
    known_median: float
    known_most: float
    unknown: int
    wrongly_down: int
    death_processor: float
    links_missing: int


@dataclass
class _Peer:
    """A link, as `PeerLink` sees it. ``turn`` counts pings: one that is not the last any more is not sent."""

    every: float = 1.0
    dead: bool = False
    lost: bool = False
    heard: float = 0.0
    asked: float = 0.0
    turn: int = 0
    told: bool = False
    down: float = 0.0


@dataclass
class _Loop:
    """The queue of a kvd's one thread."""

    now: float = 0.0
    free: float = 0.0
    busy: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: int = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do it then."""
        self.numbers += 1
        heapq.heappush(self.events, (when, self.numbers, act))

    def work(self, seconds: float) -> float:
        """Take the thread for so long as soon as it is free; when that is over."""
        self.free = max(self.free, self.now) + seconds
        self.busy += seconds
        return self.free

    def run(self, until: float) -> None:
        """Let things happen."""
        while self.events and self.events[0][0] <= until:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = until


def predict(hosts: int, workers: int, costs: Costs, peers: int | None = None) -> Predicted:
    """A fleet whose kvds link to each other, or to ``peers`` of them each: those whose engines they use."""
    linked = hosts - 1 if peers is None else min(peers, hosts - 1)
    within = min(linked, MAX_LINKS)
    pause = LOOK_SECONDS * SETTLED_LOOKS * max(1.0, within / LOOKS_A_SECOND)
    quiet = max(SETTINGS.ping_seconds, min(LONGEST_QUIET_SECONDS, within / QUIET_PINGS_A_SECOND))
    used = (within + 1) // 2
    asked = used / SETTINGS.ping_seconds + (within - used) / quiet, within / pause
    look_bytes = costs.look_bytes + costs.name_bytes * within / 2
    every = [SETTINGS.ping_seconds if number < used else quiet for number in range(within)]
    seen = [_Observer(every, costs, pause, random.Random(seed)) for seed in range(OBSERVERS)]  # noqa: S311
    for one in seen:
        one.live_and_let_die()
    known = sorted(after for one in seen for after in one.known)
    pairs = within / 2
    return Predicted(
        hosts=hosts,
        peers=linked,
        workers=workers,
        processor=costs.idle + asked[0] * costs.ping + asked[1] * costs.look,
        messages=sum(asked),
        bytes=2 * (asked[0] * costs.ping_bytes + asked[1] * look_bytes),
        fleet_messages=hosts * sum(asked),
        memory=costs.memory + within * costs.peer_memory + pairs * (workers - 1) * costs.worker_memory,
        warm=max(one.warm for one in seen),
        known_median=median(known) if known else 0.0,
        known_most=known[-1] if known else 0.0,
        unknown=sum(one.unknown for one in seen),
        wrongly_down=sum(one.wrongly_down for one in seen),
        death_processor=seen[0].dying * costs.down,
        links_missing=linked - within,
    )


class _Observer:
    """One kvd and its links."""

    def __init__(self, every: list[float], costs: Costs, pause: float, dice: random.Random) -> None:
        self.costs, self.dice, self.pause = costs, dice, pause
        self.loop = _Loop()
        self.links = [_Peer(one) for one in every]
        self.dying = max(1, len(every) // 10) if every else 0
        self.exchanges = 2 * sum(1 / one for one in every)  # a second: as often as it asks it is asked
        self.known: list[float] = []
        self.unknown = self.wrongly_down = 0
        self.warm = 0.0
        self.died = math.inf

    def live_and_let_die(self) -> None:
        """Everybody is linked; engines come, and are introduced; then a tenth dies at one moment."""
        loop, costs, dice = self.loop, self.costs, self.dice
        for link in self.links:
            self._ping_at(link, dice.uniform(0, link.every))
            self._again(dice.uniform(0, link.every), link.every, costs.ping / 2, link)
            self._again(dice.uniform(0, self.pause), self.pause, costs.look, link)
        # Engines came everywhere: each kvd is looked at once, while other things get their turns.
        loop.at(dice.uniform(0, LOOK_SECONDS), lambda: self._introduce(list(self.links)))
        self._again(0.1, 0.1, costs.idle / 10, None)
        while not self.warm:
            loop.run(loop.now + 1.0)
        loop.run(max(loop.now, SETTLE) + dice.random())
        died = self.died = loop.now
        for number, link in enumerate(dice.sample(self.links, self.dying)):
            link.dead, link.lost = True, bool(number % 2)
            if link.lost:
                # The connection ends at once; it is down when none was made again for long enough.
                since = link.heard if link.every <= SETTINGS.ping_seconds else died
                loop.at(max(died, since + SETTINGS.down_seconds), lambda link=link: self._down(link))  # type: ignore[misc]
        loop.run(died + AFTER)
        dead = [link for link in self.links if link.dead]
        self.known = [link.down - died for link in dead if link.down]
        self.unknown = len(dead) - len(self.known)
        self.wrongly_down = sum(bool(link.down) for link in self.links if not link.dead)

    def _again(self, first: float, every: float, seconds: float, link: _Peer | None) -> None:
        """Something that takes the thread each so often, until its peer dies."""

        def act() -> None:
            if link is None or not link.dead:
                self._hear()
                done = self.loop.work(seconds)
                self.loop.at(max(self.loop.now + every, done), act)

        self.loop.at(first, act)

    def _introduce(self, links: list[_Peer]) -> None:
        done = self.loop.now
        if links:
            link = links.pop()
            done = self.loop.work(self.costs.look / 2)
            if link.every <= SETTINGS.ping_seconds:
                # What a peer is told of ours costs us as much as what we are told of its.
                done = self.loop.work(2 * self.costs.introduction)
        if links:
            self.loop.at(done, lambda: self._introduce(links))
        else:
            self.warm = max(done, PAUSE_SECONDS)

    def _hear(self) -> None:
        """Another kvd speaks: whether it is one that has heard of the silent ones."""
        since = self.loop.now - self.died - SETTINGS.ping_seconds
        if since <= 0 or not (silent := [link for link in self.links if link.dead and not link.lost]):
            return
        hosts = len(self.links) + 1
        if self.dice.random() >= 1 / (1 + (hosts - 1) * math.exp(-min(500.0, self.exchanges * since))):
            return
        for link in silent:
            if not link.told and not link.down:
                link.told, link.asked = True, min(link.asked, self.died)
                if link.every > SETTINGS.ping_seconds:
                    self._ping_at(link, self.loop.now)

    def _ping_at(self, link: _Peer, when: float) -> None:
        link.turn += 1
        self.loop.at(when, lambda turn=link.turn: self._ping(link) if turn == link.turn else None)  # type: ignore[misc]

    def _ping(self, link: _Peer) -> None:
        began = self.loop.now
        if link.heard >= link.asked and not link.told:
            link.asked = began if link.every > SETTINGS.ping_seconds else link.heard
        sent = self.loop.work(self.costs.ping / 4)
        theirs = sent - began  # what the other one needs
        if not link.dead and 2 * theirs <= SETTINGS.ping_seconds:
            self.loop.at(sent + theirs, lambda: self._pong(link, began))
        elif not link.lost:
            self.loop.at(began + SETTINGS.ping_seconds, lambda: self._unanswered(link, began))

    def _pong(self, link: _Peer, began: float) -> None:
        heard = self.loop.work(self.costs.ping / 4)
        link.heard = heard
        self._hear()
        if not link.lost:
            self._ping_at(link, max(heard + PAUSE_SECONDS, began + link.every))

    def _unanswered(self, link: _Peer, began: float) -> None:
        now = self.loop.work(0.0)
        if now - max(link.heard, link.asked) > SETTINGS.down_seconds:
            self._down(link)
        else:
            self._ping_at(link, max(now, began + SETTINGS.ping_seconds) + PAUSE_SECONDS)

    def _down(self, link: _Peer) -> None:
        if not link.down:
            link.down = self.loop.work(self.costs.down)
