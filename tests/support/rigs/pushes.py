"""Two engines of workers without memory that announce pushes to each other over real kvds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.geometry.rank import Rank
from kvd.wire.frame import Message
from kvd.wire.push import (
    BlockRun,
    LayersThere,
    PushAnnounce,
    PushDone,
    PushKept,
    PushKey,
    PushProgress,
    PushWithdraw,
)
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok, Refused
from tests.support.daemons import (
    Daemon,
    daemons,
    facts,
    session,
    worker,
)

LONG = 60.0
"""Seconds for which an answer is waited for."""
PUSHES = (PushAnnounce, PushWithdraw, PushDone, PushProgress)


def accept(_message: Message) -> Message:
    """A worker's answer that refuses nothing."""
    return Ok()


@dataclass
class Worker:
    """A worker without memory: its session, and what it was told of pushes. ``answer`` is what it says to them."""

    card: RegisterWorker | RegisterScheduler
    answer: Callable[[Message], Message | None] = accept
    told: list[Message] = field(default_factory=list)
    session: KvdSession = field(init=False)

    def heard(self, message: Message) -> Message | None:
        """The session's handler."""
        if not isinstance(message, (*PUSHES, PushKept)):
            return None
        self.told.append(message)
        return self.answer(message)

    @property
    def transfers(self) -> set[str]:
        """Ids of the transfers it was told of."""
        return {m.key.transfer_id for m in self.told if isinstance(m, PUSHES)}


@dataclass
class Pair:
    """A prefilling engine of two workers and a decoding one of two, at one kvd or two.

    ``generations`` are the prefiller's and the decoder's, from when they were complete: kvd's replies name none while a
    kvd that was just started still misses workers.
    """

    near: Daemon
    far: Daemon
    prefillers: list[Worker]
    decoders: list[Worker]
    generations: tuple[str, str]

    def key(self, transfer: str = "x", rank: int = 0) -> PushKey:
        """A decoding worker's name for its part of a transfer."""
        return PushKey(
            transfer_id=transfer, prefiller="p", prefiller_endpoint=self.far.endpoint, decoder="d", rank=Rank(rank)
        )  # fmt: skip

    def announce(self, transfer: str = "x", rank: int = 0, blocks: int = 3) -> PushAnnounce:
        """What the decoding worker of that rank announces."""
        return announcement(self.key(transfer, rank), self.generations, blocks)


def announcement(key: PushKey, generations: tuple[str, str], blocks: int = 3) -> PushAnnounce:
    """An announcement of so many blocks of one group."""
    return PushAnnounce(
        key=key, generations=generations, tokens=16 * blocks, computed=0,
        blocks=(BlockRun(0, 0, tuple(range(blocks))),), window=b"landing", seconds=30.0,
    )  # fmt: skip


def progress(announced: Message, source: int = 0, **what: object) -> PushProgress:
    """What a prefilling worker says to an announcement that reached it."""
    assert isinstance(announced, PushAnnounce)
    there = (LayersThere(group=0, layers=("layer.0",), tokens=announced.tokens),)
    return PushProgress(**{"key": announced.key, "source": Rank(source), "there": there, **what})  # type: ignore[arg-type]


@contextmanager
def pair(settings: str = "", *, kvds: int = 2) -> Iterator[Pair]:
    """The two engines, complete, at kvds with those settings (YAML)."""
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        file.write(settings)
        file.flush()
        started = stack.enter_context(daemons(kvds, "--config", file.name))
        yield stack.enter_context(pair_at(started[0], started[-1]))


@contextmanager
def pair_at(near: Daemon, far: Daemon) -> Iterator[Pair]:
    """The two engines, complete: the decoding one at ``near``, the prefilling one at ``far``."""
    with ExitStack() as stack:
        prefillers, decoders = (
            [Worker(worker(facts(engine, tp=2), rank)) for rank in range(2)] for engine in ("p", "d")
        )
        for kvd, made in ((far, prefillers), (near, decoders)):
            for one in made:
                one.session = stack.enter_context(session(kvd, one.card, one.heard))
            for one in made:
                one.session.wait(lambda s: bool(s.engine_generation), 20)
        of_prefiller, of_decoder = (
            made[0].session.state.engine_generation for made in (prefillers, decoders)
        )
        yield Pair(near, far, prefillers, decoders, (of_prefiller, of_decoder))


def refused(answer: Future[Message]) -> Refused:
    """Why a message was refused."""
    error = answer.exception(LONG)
    assert isinstance(error, RefusedByDaemon), error or answer.result()
    return error.refusal
