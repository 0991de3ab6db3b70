"""Simulated engines that hold prefixes, and one that asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from kvd.client.session import KvdSession
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import HERE, Endpoint, EngineFacts
from kvd.wire.prefix import SCHEME_FACT, CheckPrefix, FindPrefix, PrefixFound, PrefixKept
from kvd.wire.prefixes.cache import CacheGroup, CacheHeld, GetCache, LookedUp, LookUpTokens
from kvd.wire.prefixes.hints import HintChange, HintsTaken, TellHints
from tests.support.daemons import Daemon, facts, scheduler, session, worker

LONG = 30.0
SCHEME = "sha256/0"
BLOCK = 16


def sharing(name: str, scheme: str = SCHEME) -> EngineFacts:
    engine = facts(name)
    return msgspec.structs.replace(engine, role="both", facts={**engine.facts, SCHEME_FACT: scheme})


class Holder:
    """An engine that holds ``tokens`` of every prompt, and has kept what ``kept`` says.

    It answers operators if ``tells``, and turns down whoever asks for a prefix if it is ``busy``.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.kept, self.tells, self.busy = tokens, True, True, False
        self.heard: list[Message] = []
        self.generation = ""
        self.session: KvdSession | None = None

    def tell(self, change: HintChange, engine_id: str) -> int:
        """The version that its kvd knows then."""
        assert self.session is not None
        taken = self.session.call(TellHints(engine_id=engine_id, change=change), LONG).result(LONG)
        assert isinstance(taken, HintsTaken)
        return taken.version

    def take(self, message: Message) -> Message | None:
        if isinstance(message, FindPrefix):
            self.heard.append(message)
            if self.busy:
                return PrefixFound(busy=True)
            return PrefixFound(tokens=self.tokens, blocks=((self.tokens,),), first_blocks=(0,))
        if isinstance(message, CheckPrefix):
            self.heard.append(message)
            return PrefixKept(kept=self.kept)
        if isinstance(message, GetCache) and self.tells:
            group = CacheGroup(kind="full", block_tokens=BLOCK, blocks=self.tokens // BLOCK)
            return CacheHeld(groups=(group,), pool=64)
        if isinstance(message, LookUpTokens) and self.tells:
            held = min(self.tokens, len(message.tokens))
            return LookedUp(tokens=held, blocks=(1 if message.block_hash else held // BLOCK,))
        return None


@contextlib.contextmanager
def holding(kvd: Daemon, engine: EngineFacts, tokens: int, one: Holder | None = None) -> Iterator[Holder]:
    """The scheduler and the worker of an engine that is a `Holder`, or ``one`` that answers otherwise."""
    made = one or Holder(tokens)
    with session(kvd, worker(engine)) as first, session(kvd, scheduler(engine), made.take) as made.session:
        made.generation = first.wait(lambda s: bool(s.engine_generation), LONG).engine_generation
        yield made


@contextlib.contextmanager
def reading(kvd: Daemon, name: str = "d") -> Iterator[KvdSession]:
    """The scheduler of an engine that may ask."""
    engine = sharing(name)
    with session(kvd, worker(engine)), session(kvd, scheduler(engine)) as made:
        made.wait(lambda s: bool(s.engine_generation), LONG)
        yield made


def question(scheme: str = SCHEME, engine: str = "d") -> FindPrefix:
    return FindPrefix(
        local_engine=engine, reader="r", scheme=scheme, hash_tokens=BLOCK, hashes=b"h" * 64, most=40, beyond=3
    )


def introduce(kvd: Daemon, name: str, endpoint: Endpoint = HERE) -> None:
    kvd.ask(GetPeer(local_engine="d", engine_id=name, endpoint=endpoint))


def found(asker: KvdSession, asked: FindPrefix) -> PrefixFound:
    answer = asker.call(asked, LONG).result(LONG)
    assert isinstance(answer, PrefixFound)
    return answer
