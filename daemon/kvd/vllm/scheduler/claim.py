"""One claim of a decoding request on a remote prefill, and what can be wrong with it before anything is asked."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

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


_READERS, _NUMBERS = uuid.uuid4().hex, itertools.count(1)
"""Readers are counted in their process: to draw an id for each takes a thread that slept some 20 us."""


class ClaimState(Enum):
    """Where a claim stands. `AFTER` says what may come next."""

    WAITING = auto()
    """No load is ordered, or it missed and less of it is claimed again."""
    LOADING = auto()
    """Its load is ordered, and has not ended."""
    ABANDONED = auto()
    """Its request is over, while the load is on the way."""
    RELEASED = auto()
    """Its load has ended, or there will be none."""


AFTER: Mapping[ClaimState, frozenset[ClaimState]] = {
    ClaimState.WAITING: frozenset({ClaimState.LOADING, ClaimState.RELEASED}),
    ClaimState.LOADING: frozenset({ClaimState.WAITING, ClaimState.ABANDONED, ClaimState.RELEASED}),
    ClaimState.ABANDONED: frozenset({ClaimState.RELEASED}),
    ClaimState.RELEASED: frozenset(),
}
"""The states that may follow each."""


@dataclass(slots=True)
class LeaseHold:
    """What is known of the lease on a claim's blocks. Times are time.monotonic() seconds.

    ``asked`` is when kvd was asked last, 0 before that; ``answer`` is its answer while that is awaited, ``due`` when to
    ask. The answer on a claim that is alone ``came`` at that time. Until ``valid_until`` the blocks are kept.
    """

    answer: Future[Message] | None = None
    asked: float = 0.0
    due: float = 0.0
    retries: int = 0
    came: float = 0.0
    valid_until: float = 0.0


@dataclass(slots=True)
class Claim:
    """One request's claim, under an id of its own (``reader``): others may claim the same lease.

    Where it is ``checked`` it is on a prefix that another engine holds, without a lease.
    With a ``transfer_id`` its blocks are pushed, and no lease is claimed. ``prompt`` is there until it has been
    compared with the one that was prefilled, ``digest`` is its own where the prefiller compares. ``peer`` is kvd's
    answer on the prefiller. ``computed`` of its ``tokens`` are here already, ``kept`` may be claimed after a miss, and
    ``again`` says how often that was done. Its load was ``ordered`` (time.monotonic()), and runs ``beside`` it while no
    worker was told how it was answered; ``in_step``: the step that orders it uses it. ``alone``: that was expected when
    it was sent, so kvd tells the answer to our scheduler alone. With a ``cause`` it is missed, or ``refused`` while its
    load was under way. ``traceparent`` is of the request (`kvd.vllm.request_trace`).
    """

    request_id: str
    prefill: RemotePrefill
    tokens: int
    began: float
    prompt: Prompt | None = None
    digest: str = ""
    transfer_id: str = ""
    reader: str = field(default_factory=lambda: f"{_READERS}-{os.getpid()}-{next(_NUMBERS)}")
    state: ClaimState = ClaimState.WAITING
    cause: Cause | None = None
    peer: Future[Message] | None = None
    peer_due: float = 0.0
    peer_known: bool = False
    handshake_seconds: float = 0.0
    lease: LeaseHold = field(default_factory=LeaseHold)
    computed: int = 0
    kept: int = 0
    again: int = 0
    ordered: float = 0.0
    beside: bool = False
    refused: bool = False
    checked: bool = False
    in_step: bool = False
    alone: bool = False
    traceparent: str = ""

    @property
    def waiting(self) -> bool:
        """Whether no load was ordered, and one still may be."""
        return self.state is ClaimState.WAITING

    @property
    def pending(self) -> bool:
        """Neither usable nor given up yet."""
        return not self.cause and not (self.peer_known and self.lease.valid_until)

    def go(self, state: ClaimState) -> None:
        """It stands like this from now on. Raises `RuntimeError` where `AFTER` rules that out."""
        if state is self.state:
            return
        if state not in AFTER[self.state]:
            is_now, wanted = self.state.name.lower(), state.name.lower()
            raise RuntimeError(f"the claim of request {self.request_id} is {is_now} and cannot be {wanted}")
        self.state = state


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
