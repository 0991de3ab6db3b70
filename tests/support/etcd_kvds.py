"""Real kvds that are told of each other by etcd alone, and engines on them that note whom they were given."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvd.client.session import KvdSession
from kvd.service.peers.peer_engine import complementary
from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady
from kvd.wire.identity import EngineFacts, Role
from kvd.wire.query import Membership
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from tests.support import traffic
from tests.support.daemons import START_SECONDS, Daemon, facts, scheduler, worker
from tests.support.etcds import Etcd


def settings(*servers: Etcd, **more: str) -> dict[str, str]:
    """Variables of a kvd that finds the others in these etcd servers."""
    return {
        "KVD_MEMBERSHIP_SOURCE": "etcd",
        "KVD_MEMBERSHIP_ETCD_ENDPOINTS": ",".join(one.url for one in servers),
        "KVD_MEMBERSHIP_ETCD_CLUSTER": "test",
        **more,
    }


@contextmanager
def kvds(count: int, *servers: Etcd, **more: str) -> Iterator[list[Daemon]]:
    """Kvds that are told of each other by etcd alone."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as place, ExitStack() as stack:
        made = [Daemon(Path(place) / f"d{number}") for number in range(count)]
        for number, kvd in enumerate(made):
            kvd.environment = settings(*servers, KVD_MEMBERSHIP_ETCD_HOST=f"h{number}") | more
            stack.callback(kvd.kill)
            kvd.start(wait=False)
        for kvd in made:
            kvd.port = kvd.status(20 + 2 * count).endpoint.port
        yield made


def membership(kvd: Daemon) -> Membership:
    """What a kvd says of its members."""
    row = kvd.status().membership
    assert row is not None
    return row


def linked(kvd: Daemon) -> set[int]:
    """The ports of the kvds to which it has a link that works."""
    return {peer.endpoint.port for peer in kvd.status().peers if peer.state == "up"}


def all_linked(made: list[Daemon]) -> bool:
    """Whether each has a link that works to each other one."""
    return all(linked(kvd) == {other.port for other in made if other is not kvd} for kvd in made)


def all_there(server: Etcd, made: list[Daemon]) -> bool:
    """Whether each one's own key stands in etcd, with where it is, under a lease."""
    found = server.hosts()
    return all(
        f"127.0.0.1:{kvd.port}" in found.get(f"h{number}", {}).get("text", "")
        and found[f"h{number}"].get("lease")
        for number, kvd in enumerate(made)
    )


@dataclass
class Given:
    """What one client of an engine was told of peers: those that it may use now, by id and generation."""

    peers: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    last: float = 0.0
    """When it was told last, by time.monotonic()."""

    def __call__(self, message: Message) -> None:
        """Take note of a push."""
        with self.changed:
            if isinstance(message, PeerReady):
                self.peers[message.peer.engine.engine_id] = message.peer.generation
            elif isinstance(message, PeerGone) and self.peers.get(message.engine_id) == message.generation:
                del self.peers[message.engine_id]
            else:
                return
            self.last = time.monotonic()
            self.changed.notify_all()

    def wait(self, enough: Callable[[dict[str, str]], bool], deadline: float) -> float:
        """When it was told what is enough. Raises `AssertionError` after the deadline."""
        with self.changed:
            fine = self.changed.wait_for(lambda: enough(self.peers), max(0.0, deadline - time.monotonic()))
            assert fine, f"it knows {sorted(self.peers)}"
            return self.last


@dataclass
class SimulatedEngine:
    """A worker and a scheduler on a kvd, with what each was told of peers. ``generation`` is known once it is ready."""

    facts: EngineFacts
    clients: tuple[Given, Given]
    sessions: tuple[KvdSession, KvdSession]
    generation: str = ""

    @property
    def name(self) -> str:
        """Its id."""
        return self.facts.engine_id

    def ready(self, seconds: float = START_SECONDS) -> SimulatedEngine:
        """Wait until it is."""
        one, other = self.sessions
        self.generation = one.wait(lambda state: bool(state.engine_generation), seconds).engine_generation
        other.wait(lambda state: state.connected, seconds)
        return self

    def warm(self, others: dict[str, str], deadline: float) -> float:
        """When both clients knew exactly these others, by id and generation, and perhaps `Traffic`'s engines."""

        def known(peers: dict[str, str]) -> bool:
            return {name: made for name, made in peers.items() if name not in traffic.ENGINES} == others

        return max(one.wait(known, deadline) for one in self.clients)

    def close(self) -> None:
        """It is gone, as when its processes end."""
        for one in self.sessions:
            one.close()


def engine(kvd: Daemon, name: str, role: Role = "both") -> SimulatedEngine:
    """An engine that comes up on a kvd. Its owner closes it."""
    of = msgspec.structs.replace(facts(name), role=role)
    cards: tuple[RegisterWorker, RegisterScheduler] = worker(of), scheduler(of)
    given = Given(), Given()
    one, other = (
        KvdSession(lambda card=card: card, to, directory=kvd.directory)  # type: ignore[misc]
        for card, to in zip(cards, given, strict=True)
    )
    return SimulatedEngine(of, given, (one, other))


def partners(engines: list[SimulatedEngine], of: SimulatedEngine) -> dict[str, str]:
    """The engines that one is to be warm with, by id and generation: all but itself that KV can move to or from."""
    return {
        one.name: one.generation
        for one in engines
        if one is not of and complementary(one.facts.role, of.facts.role)
    }


def all_warm(engines: list[SimulatedEngine], seconds: float) -> float:
    """When the last of all pairs that should be warm was, by time.monotonic()."""
    deadline = time.monotonic() + seconds
    return max(one.warm(partners(engines, one), deadline) for one in engines)
