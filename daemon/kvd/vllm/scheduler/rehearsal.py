"""A decoder's first request, gone through before it comes.

What runs for the first time takes several times as long: Python adapts code that it has run, msgspec makes its
encoders, libraries look up what they need. So an engine that starts goes through the arrival of a request that nobody
sent, of a prefiller that does not exist, without a kvd. No engine, kvd or peer sees anything of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from kvd.client.mailbox import SessionState
from kvd.shown import logger
from kvd.vllm.memory.groups import GroupFacts, has_state
from kvd.vllm.params import finished_prefill
from kvd.vllm.prompt.digest import new_key
from kvd.vllm.prompt.parts import Prompt
from kvd.vllm.prompt.seal import sealed
from kvd.vllm.scheduler.claims import Claims
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.scheduler.load_order import load_order
from kvd.wire.frame import Message, decode, encode
from kvd.wire.identity import HERE, EngineCard, EngineFacts
from kvd.wire.lease import LeaseClaimed
from kvd.worker.orders import LoadOrder
from kvd.worker.remote import RemotePrefill
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

TIMES = 12
"""Python adapts code that has run some times, each function by itself."""
TOKENS = 512
"""Of the prompt."""
_NOBODY = "rehearsal"


def try_rehearsal(settings: ConnectorSettings, groups: Sequence[GroupFacts]) -> None:
    """`rehearse`, of which no engine's start depends."""
    try:
        rehearse(settings, groups)
    except Exception:  # whatever it is, the first request meets it where it is dealt with
        log.exception("the rehearsal of a request's arrival failed; the first one may take longer")


def rehearse(settings: ConnectorSettings, groups: Sequence[GroupFacts]) -> LoadOrder:
    """Go through the arrival of a request, until its load is ordered, and through the load's end; the last order."""
    ids, key, known = list(range(TOKENS)), new_key(), KnownPeers()
    facts = EngineFacts(engine_id=_NOBODY, model=_NOBODY, groups=len(groups))
    known.learn(EngineCard(engine=facts, generation=_NOBODY, workers=(), digest_key=key), HERE)
    prompt = Prompt(SimpleNamespace(prompt_token_ids=ids, _all_token_ids=ids), len(ids))
    for _ in range(TIMES):
        order = _arrival(settings, groups, known, prompt, key)
    return order


def _arrival(
    settings: ConnectorSettings,
    groups: Sequence[GroupFacts],
    known: KnownPeers,
    prompt: Prompt,
    key: bytes,
) -> LoadOrder:
    kvd, tokens = _Willing(), prompt.tokens - 1
    claims = Claims(settings, "", kvd, known)
    blocks = tuple(tuple(range(1, 1 + -(-tokens // group.block_size))) for group in groups)
    prefill = RemotePrefill(
        engine_id=_NOBODY, request_id=_NOBODY, generation=_NOBODY, host=_NOBODY, port=1, tokens=tokens,
        blocks=blocks, first_blocks=(0,) * len(groups), lease_seconds=settings.lease_seconds,
        lease_opened=time.time(), digest=prompt.digest(key, tokens),
    )  # fmt: skip
    params = finished_prefill(sealed(key, prefill), tp=1, pp=1, dcp=1)
    claims.begin(_NOBODY, params, prompt, state=has_state(groups))
    (claim,) = claims.all()
    claims.advance(claim, time.monotonic())
    claims.may_begin(claim)
    claims.order_load(claim)
    order = load_order(claim, groups, blocks, tokens, settings, None, (), lambda _: None)
    kvd.keep(claim.prefill)
    claims.renew(time.monotonic())
    claims.take_answered()
    claims.end(claim, "done")
    return order


class _Willing:
    """A kvd that is sent everything as a real one would be, and keeps the lease that it was asked for."""

    state = SessionState(connected=True)

    def __init__(self) -> None:
        self._asked: Future[Message] = Future()

    def keep(self, prefill: RemotePrefill) -> None:
        kept = LeaseClaimed(request_id=prefill.request_id, seconds=1e3, generation=prefill.generation)
        self._asked.set_result(decode(encode(kept, 1))[0])

    def call(self, message: Message, timeout: float) -> Future[Message]:  # noqa: ARG002 - as the real one
        encode(message, 1)
        return self._asked

    def deliver(
        self,
        key: str,  # noqa: ARG002 - as the real one
        message: Message | Callable[[], Message],
        keep_seconds: float = 0.0,  # noqa: ARG002
        *,
        after: float = 0.0,  # noqa: ARG002
    ) -> Future[Message]:
        encode(message() if callable(message) else message, 1)
        return Future()

    def close(self, timeout: float = 0.0) -> None:
        """Nothing to close."""
