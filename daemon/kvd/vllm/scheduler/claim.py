"""One claim of a decoding request on a remote prefill, and what can be wrong with it before anything is asked."""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvd.vllm.errors import BadParams
from kvd.vllm.prompt.parts import Prompt
from kvd.wire.frame import Message
from kvd.worker.cause import Cause
from kvd.worker.remote import RemotePrefill

NOBODY = RemotePrefill(
    engine_id="",
    request_id="",
    generation="",
    host="",
    port=0,
    tokens=0,
    blocks=(),
    first_blocks=(),
    lease_seconds=0.0,
    lease_opened=0.0,
)
"""Stands for the prefiller that unusable params do not name."""


@dataclass(slots=True)
class Claim:
    """One request's claim, under an id of its own (``reader``): others may claim the same lease.

    With a ``transfer_id`` its blocks are pushed, and no lease is claimed. ``valid_until`` is time.monotonic() seconds
    until which the blocks are certainly kept; ``by_clock``: only the prefiller's own statement says so. ``prompt`` is
    there until it has been compared with the one that was prefilled, ``digest`` is its own where the prefiller
    compares. ``claimed``: kvd was asked for the lease. ``used``: a load was ordered, or nothing is to be loaded.
    ``ended``: the lease is released. ``over``: the request has finished. ``prefix``: tokens that may be claimed after a
    miss, ``again`` how often that was done.
    """

    request_id: str
    prefill: RemotePrefill
    tokens: int
    began: float
    prompt: Prompt | None = None
    digest: str = ""
    reader: str = field(default_factory=lambda: uuid.uuid4().hex)
    peer: Future[Message] | None = None
    lease: Future[Message] | None = None
    lease_asked: float = 0.0
    lease_retries: int = 0
    lease_due: float = 0.0
    valid_until: float = 0.0
    claimed: bool = False
    by_clock: bool = False
    handshake_seconds: float = 0.0
    peer_known: bool = False
    used: bool = False
    ended: bool = False
    over: bool = False
    computed: int = 0
    cause: Cause | None = None
    transfer_id: str = ""
    prefix: int = 0
    again: int = 0

    @property
    def pending(self) -> bool:
        """Neither usable nor given up yet."""
        return not self.cause and not (self.peer_known and self.valid_until)


def unsealed(prefill: RemotePrefill) -> Cause:
    """The cause where params are not as the prefiller gave them."""
    return Cause(
        f"kv_transfer_params: these are not the params that prefiller {prefill.engine_id} gave (kvd_seal does not"
        " hold): hand them on unchanged",
        "BAD_PARAMS",
    )


def mismatch(claim: Claim, other: str) -> Cause:
    """The cause where a prompt is not the one that was prefilled; ``other`` says how it differs."""
    prefill = claim.prefill
    return Cause(
        f"request {prefill.request_id} of prefiller {prefill.engine_id} had another prompt: {other} (one set of params"
        " for several prompts, params of the client's own, or another tokenizer, chat template or adapter)",
        "PROMPT_MISMATCH",
    )


def check_state(prefill: RemotePrefill, prompt_tokens: int, *, state: bool) -> None:
    """A state fits one position only, and the last token must be computed here. Raises `BadParams`."""
    if state and prefill.tokens == prompt_tokens:
        raise BadParams(
            f"the prefiller's state is the one after {prefill.tokens} tokens and the prompt has {prompt_tokens}:"
            " the last one must be computed here, so a state of one token less is needed"
        )
