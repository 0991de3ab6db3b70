"""A local engine and its clients, the workers and the scheduler.

Python's collector of cycles looks at neither: for 10,000 of them that would take 0.1 s, in one turn of the loop. So a
client refers to no engine, and an engine drops a waiter when the waiting ends.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal

import msgspec

from kvd.geometry.content import added
from kvd.geometry.rank import Rank
from kvd.service.engines.shape import engine_shape
from kvd.service.errors import RequestRefused
from kvd.shown import MAX_WORD, cut
from kvd.topology.compatibility_class import class_of
from kvd.wire.identity import HERE, Endpoint, EngineCard, EngineFacts, WorkerCard
from kvd.wire.locality import Locality

ClientState = Literal["alive", "silent", "gone"]
EngineState = Literal["ready", "partial", "gone"]
ENDED_KEPT = 64
"""Generations of an engine that are remembered as ended."""


class Client(msgspec.Struct, gc=False):
    """A local worker or scheduler. ``last_heard`` is time.monotonic(), ``registered`` and ``since`` are Unix time.

    ``process`` and ``uid`` are its process and that one's user, as the kernel names them. They are 0 where the process
    is in another PID namespace, -1 where the kernel does not say. ``pid`` is what operators are told. ``size`` is what
    its card and facts take, in bytes. ``shape`` is the digest of a worker's geometry without addresses, ``content``
    what its layers hold; ``parts``, ``outlines``: it takes cards of peers so. ``digest_key`` is a scheduler's.
    ``ended``: it is gone for certain, and not only silent.

    ``home`` is the kvd of its engine's scheduler if the engine is on several hosts (`kvd.wire.part`), this one being
    `HERE`. ``at`` is the kvd that a worker of such an engine is registered with, None for this one. ``locality`` is
    what a worker told of where it stands.
    """

    kind: Literal["worker", "scheduler"]
    engine: EngineFacts
    incarnation: str
    pid: int
    route: bytes
    rank: Rank | None = None
    card: WorkerCard | None = None
    shape: str = ""
    content: int = 0
    parts: bool = False
    outlines: bool = False
    policy: str = ""
    digest_key: bytes = b""
    uid: int = -1
    process: int = 0
    size: int = 0
    regions: int = 0
    registered_bytes: int = 0
    home: Endpoint | None = None
    at: Endpoint | None = None
    locality: Locality | None = None
    state: ClientState = "alive"
    reason: str = ""
    ended: bool = False
    last_heard: float = msgspec.field(default_factory=time.monotonic)
    registered: float = msgspec.field(default_factory=time.time)
    since: float = msgspec.field(default_factory=time.time)

    def __repr__(self) -> str:
        return f"<{self.name} {self.incarnation}, {self.owner}: {self.state}>"  # a key is for nobody's log

    @property
    def name(self) -> str:
        """``ENGINE/tp0`` or ``ENGINE/scheduler``, as it stands in messages."""
        return f"{self.engine.engine_id}/{self.rank or 'scheduler'}"

    @property
    def owner(self) -> str:
        """Whose it is, as it stands in refusals."""
        if self.at is not None:
            return f"process {self.pid} at the kvd at {self.at}"
        return who(self.uid, self.process or self.pid)

    @property
    def elsewhere(self) -> Endpoint | None:
        """The home of its engine, where that is another kvd."""
        return self.home if self.home != HERE else None

    def remember_briefly(self) -> None:
        """It is gone: it is remembered for operators, who look at no card and at the front of a long name."""
        self.engine, self.policy = briefly(self.engine), cut(self.policy, MAX_WORD)
        if self.card is not None:
            self.card = msgspec.structs.replace(
                self.card,
                engine=self.engine,
                host=cut(self.card.host, MAX_WORD),
                backend=cut(self.card.backend, MAX_WORD),
                geometry=b"",
                metadata=b"",
            )

    def is_of(self, uid: int, process: int, at: Endpoint | None = None) -> bool:
        """Whether it is that user's, and that process's where the kernel shows both, of this host or another one.

        It does not show processes of other PID namespaces. There the user and the incarnation, which is random, decide.
        """
        shown = bool(self.process and process)
        return self.at == at and self.uid == uid and (self.process == process or not shown)


def _in_card(rank: Rank) -> tuple[int, int, int]:
    return rank.pp, rank.dcp, rank.tp


def briefly(engine: EngineFacts) -> EngineFacts:
    """What is remembered of the facts of an engine that is gone, or of which a client is."""
    return msgspec.structs.replace(engine, model=cut(engine.model, MAX_WORD), facts={})


def who(uid: int, process: int) -> str:
    """A user's process, as it stands in refusals."""
    return f"process {process or '?'} of uid {uid}"


class LocalEngine(msgspec.Struct, gc=False):
    """A local engine: the clients of it that live, all of one user.

    ``generation``, ``shape`` (`find_shape`) and ``compatibility_class`` are empty unless all workers are here. ``home``
    is as its clients say.
    Of an engine whose home is elsewhere only the workers of this host are here, and it is as complete as its home has
    ``told``: the generation, empty while any worker is missing.

    ``ranks`` are the places that its workers have, in the card's order, ``incarnations`` theirs, sorted. Both are kept
    in order as workers come and go: an engine of 16,384 of them is not sorted anew for each that is replaced.
    """

    facts: EngineFacts
    uid: int = -1
    home: Endpoint | None = None
    told: str = ""
    workers: dict[Rank, Client] = {}
    ranks: list[Rank] = []
    incarnations: list[str] = []
    scheduler: Client | None = None
    generation: str = ""
    shape: str = ""
    compatibility_class: str = ""
    state: EngineState = "partial"
    since: float = msgspec.field(default_factory=time.time)
    reason: str = ""
    ended: tuple[str, ...] = ()
    waiters: set[asyncio.Future[None]] | None = None

    @property
    def clients(self) -> Iterator[Client]:
        """Its living workers and its scheduler."""
        yield from self.workers.values()
        if self.scheduler is not None:
            yield self.scheduler

    @property
    def alive(self) -> bool:
        """Whether any client of it lives."""
        return bool(self.workers) or self.scheduler is not None

    def holder(self, rank: Rank | None) -> Client | None:
        """Who has that worker's place, or without a rank the scheduler's."""
        return self.scheduler if rank is None else self.workers.get(rank)

    def take(self, client: Client) -> None:
        """A client has its place from now on."""
        if client.rank is None:
            self.scheduler = client
            return
        self.lose(client)
        self.workers[client.rank] = client
        insort(self.ranks, client.rank, key=_in_card)
        insort(self.incarnations, client.incarnation)

    def lose(self, client: Client) -> None:
        """A client is no more, nor who has its place."""
        if client.rank is None:
            self.scheduler = None
        elif (holder := self.workers.pop(client.rank, None)) is not None:
            del self.ranks[bisect_left(self.ranks, _in_card(client.rank), key=_in_card)]
            del self.incarnations[bisect_left(self.incarnations, holder.incarnation)]

    @property
    def elsewhere(self) -> Endpoint | None:
        """Its home, where that is another kvd."""
        return self.home if self.home != HERE else None

    @property
    def complete(self) -> bool:
        """Whether all its workers live."""
        return bool(self.told) if self.elsewhere is not None else len(self.workers) >= self.facts.world_size

    @property
    def up(self) -> bool:
        """Whether it serves: vLLM makes its scheduler once the workers have warmed up."""
        return self.state == "ready" and self.scheduler is not None

    def card(self) -> EngineCard:
        """What peers are told of it. Only for an engine that is ready."""
        cards = tuple(worker.card for worker in self.ordered if worker.card)
        key = self.scheduler.digest_key if self.scheduler is not None else b""
        return EngineCard(
            engine=self.facts,
            generation=self.generation,
            workers=cards,
            digest_key=key,
            compatibility_class=self.compatibility_class,
        )

    def find_class(self) -> str:
        """Engines of one class fit (`kvd.topology.compatibility_class`); empty unless all workers are at this kvd."""
        if self.elsewhere is not None:
            return ""
        backends = sorted({worker.card.backend for worker in self.workers.values() if worker.card})
        stages = {rank.pp: worker.content for rank, worker in self.workers.items()}
        return class_of(
            self.facts.model, {**self.facts.facts, "backend": ",".join(backends)}, added(stages.values())
        )

    def worker(self, rank: Rank) -> Client:
        """Its worker of that rank. Raises `RequestRefused`; only for an engine that is ready."""
        if rank in self.workers:
            return self.workers[rank]
        raise RequestRefused(
            "KVD-RANK-UNKNOWN",
            f"engine {self.facts.engine_id!r} has no worker {rank}: it has {self.facts.world_size} workers",
            hint="`kvctl workers` lists them",
            final=True,
        )

    @property
    def ordered(self) -> tuple[Client, ...]:
        """Its workers in the order of ranks."""
        return tuple(self.workers[rank] for rank in self.ranks)

    async def woken(self, seconds: float) -> None:
        """Wait until it is more complete, ``seconds`` at most."""
        waiter = asyncio.get_running_loop().create_future()
        if self.waiters is None:
            self.waiters = set()
        self.waiters.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            pass
        finally:
            self.waiters.discard(waiter)
            if not self.waiters:
                self.waiters = None

    def wake(self) -> None:
        """End the waiting for it."""
        for waiter in self.waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def find_shape(self) -> str:
        """A digest of all that decides what it fits: not its id, and no address. Empty where a part is unknown."""
        workers = [(worker.card.backend if worker.card else "", worker.shape) for worker in self.ordered]
        if not all(shape for _, shape in workers):
            return ""
        return engine_shape(self.facts, workers)
