"""A desk at which one claim of a decoding scheduler is answered as the test says, without a kvd."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from kvd.vllm.params import finished_prefill
from kvd.vllm.prompt.parts import Prompt
from kvd.vllm.scheduler.claim import Claim
from kvd.vllm.scheduler.claims import Claims
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineCard
from kvd.wire.lease import LeaseClaim, LeaseClaimed
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import GENERATION, KEY, Script, facts, prefill
from tests.support.rigs.bench import prompt as prompt_of_tokens

SETTINGS = ConnectorSettings(lease_seconds=30.0, lease_margin=0.5, handshake_timeout=10.0)
PEER = PeerReady(
    local_engine="d",
    peer=EngineCard(engine=facts("p"), generation=GENERATION, workers=(), digest_key=KEY),
    seconds=0.25,
)
KEYLESS = msgspec.structs.replace(PEER, peer=msgspec.structs.replace(PEER.peer, digest_key=b""))


PROMPT = prompt_of_tokens(range(8))


class Desk:
    """One claim of 8 tokens on a prompt of 8, and the means to answer it; its peer was ``known`` before, or not."""

    def __init__(
        self,
        *,
        lease_opened: float | None = None,
        state: bool = False,
        known: bool = True,
        prompt: Prompt = PROMPT,
        **changes: Any,
    ) -> None:
        self.script, self.known = Script(), KnownPeers()
        if known:
            self.known.on_message(PEER)
        self.claims = Claims(SETTINGS, "d", self.script, self.known)
        sent = prefill(((5, 6),), lease_opened=lease_opened)
        self.claims.begin("r", {**finished_prefill(sent, tp=1, pp=1, dcp=1), **changes}, prompt, state=state)
        found = self.claims.get("r")
        assert found is not None
        self.claim: Claim = found

    def peer(self, answer: Message | Exception, number: int = 0) -> None:
        self._answer(GetPeer, answer, number)

    def lease(self, answer: Message | Exception, number: int = -1) -> None:
        self._answer(LeaseClaim, answer, number)

    def _answer(self, kind: type[Any], answer: Message | Exception, number: int) -> None:
        future = self.script.asked(kind)[number].future
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def advance(self, later: float = 0.0) -> Claim:
        self.claims.advance(self.claim, time.monotonic() + later)
        return self.claim


def claimed(seconds: float, reason: str = "", *, ended: bool = False, current: bool = True) -> LeaseClaimed:
    """kvd's answer; it knows the prefiller to be ``current``, or does not say."""
    generation = GENERATION if current and seconds else ""
    return LeaseClaimed(request_id="p-1", seconds=seconds, reason=reason, ended=ended, generation=generation)


def unsaid() -> Desk:
    """A desk whose lease is kept, by a kvd that does not say whether the prefiller is who it was: it is asked that."""
    desk = Desk()
    desk.lease(claimed(20.0, current=False))
    for _ in range(2):
        assert desk.advance().pending
    assert len(desk.script.asked(GetPeer)) == 1
    return desk
