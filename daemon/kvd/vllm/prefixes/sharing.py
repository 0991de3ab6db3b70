"""One scheduler's part in sharing prefixes, both sides of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.prefixes.allowance import Allowance
from kvd.vllm.prefixes.cache import PrefixCache
from kvd.vllm.prefixes.holder import PrefixHolder
from kvd.vllm.prefixes.seeker import PrefixSeeker
from kvd.vllm.prefixes.telling import HintTeller
from kvd.vllm.vllm_types import VllmRequest, VllmStep
from kvd.wire.frame import Message
from kvd.wire.identity import EngineFacts
from kvd.wire.prefix import SCHEME_FACT
from kvd.worker.remote import RemotePrefill
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings


class Prefixes:
    """One scheduler's. Does nothing where they are not shared, and before vLLM's cache is known."""

    def __init__(
        self,
        settings: ConnectorSettings,
        engine: EngineFacts,
        groups: Sequence[GroupFacts],
        session: Callable[[], SessionProtocol],
        claim: Callable[[str, RemotePrefill, str], None],
    ) -> None:
        """``session`` gives the session with kvd, which may ask before it is there itself.

        ``claim`` is told of what was found for a request, and the name to read it under.
        """
        self._settings = settings
        self._engine = engine
        self._groups = tuple(groups)
        self._session = session
        self._claim = claim
        self._scheme = str(engine.facts.get(SCHEME_FACT) or "")
        self._holder: PrefixHolder | None = None
        self._teller: HintTeller | None = None
        self._seeker: PrefixSeeker | None = None
        self._running: set[str] = set()
        """Those that were given blocks and have not ended."""
        self._lockstep = False
        self._allowance = Allowance(settings.prefix_cost, time.monotonic())

    def bind(self, manager: Any, together: int = 1) -> None:
        """Share what vLLM's KVCacheManager has. Raises `UnsupportedBuild`.

        So many engines make their steps ``together``; where there are several none is ever idle.
        """
        if not self._scheme:
            return
        self._lockstep = together > 1
        cache = PrefixCache(manager, self._groups, self._settings.prefix_least)
        self._holder = PrefixHolder(cache, self._groups, self._scheme, self._turns_down)
        self._seeker = PrefixSeeker(
            self._settings,
            self._engine.engine_id,
            self._session(),
            self._scheme,
            cache.hash_tokens,
            len(self._groups),
        )
        self._teller = HintTeller(self._engine.engine_id, cache.boundaries, self._session())
        self._teller.changed()

    def allocated(self, request: VllmRequest, tables: Sequence[Sequence[Any]]) -> None:
        """A request has blocks, in vLLM's own lists."""
        if self._holder is not None:
            self._running.add(request.request_id)
            self._holder.allocated(request, tables)

    def step(self, output: VllmStep | None) -> None:
        """A step is about to run."""
        if self._holder is not None and output is not None:
            self._holder.step(output)
        if self._teller is not None:
            self._teller.changed()

    def finished(self, request: VllmRequest) -> None:
        """A request ended; its blocks are still its own."""
        self._running.discard(request.request_id)
        if self._holder is not None:
            self._holder.finished(request)
        if self._teller is not None:
            self._teller.changed()
        if self._seeker is not None:
            self._seeker.forget(request.request_id)

    def read_cost(self, seconds: float) -> None:
        """Peers' reads have cost this engine so much since the last time."""
        self._allowance.take(seconds, time.monotonic())

    def _turns_down(self) -> bool:
        """Whether reads have cost too much to allow another one; on the session's thread. An idle engine has time."""
        computes = self._lockstep or bool(self._running)
        return computes and self._allowance.left(time.monotonic()) <= 0

    def asks(self, request: VllmRequest, computed: int) -> bool:
        """Whether it is being asked who holds more of a prompt than ``computed`` tokens. What is found is claimed."""
        if self._seeker is None:
            return False
        idle = not self._running and not self._lockstep
        found = self._seeker.look(request, computed, idle=idle)
        if found == "asking":
            return True
        if found is not None:
            self._claim(request.request_id, found.prefill, found.reader)
        return False

    def registering(self) -> None:
        """Kvd is about to be told who we are, on the session's thread."""
        if self._teller is not None:
            self._teller.forgotten()

    def answer(self, message: Message) -> Message | None:
        """What another engine is told of what is held here, on the session's thread."""
        return self._holder.answer(message) if self._holder is not None else None
