"""The decoding side's claims: one for each request that was prefilled elsewhere, from arrival to its end.

A claim becomes usable when four things are known. The peer engine fits (handshake). The params are as it gave them
(seal). Its prompt is this request's (digest). Its blocks are kept long enough (lease). Nothing is claimed, and so
nothing released, before these were compared: the request that a lease is for may be another one. Only the prefiller's
kvd can say that a lease is kept for one more reader, and while it is away a claim waits for it
(`kvd.vllm.scheduler.asking`). Its load may begin beside it, and is used once it is answered
(`kvd.vllm.scheduler.beside`).

The same claim is never made again, whatever goes wrong. What missed may be followed by a smaller one, of the prefix
that came: at most `MAX_AGAIN` times, while the lease holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, Literal

import msgspec

from kvd.vllm.errors import BadParams
from kvd.vllm.params import read_remote_prefill, read_remote_push, wants_push
from kvd.vllm.prompt.parts import Prompt
from kvd.vllm.prompt.seal import is_sealed
from kvd.vllm.scheduler.asking import (
    ClaimAsker,
    ask_lease,
    ask_peer,
    lease_key,
    look_at_lease,
    look_at_peer,
    take_lease,
)
from kvd.vllm.scheduler.beside import answer_on, may_begin
from kvd.vllm.scheduler.claim import NOBODY, Claim, ClaimState, check_state, mismatch, unsealed
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.scheduler.transfer_ids import TransferIds
from kvd.vllm.vllm_types import VllmRequest
from kvd.wire.lease import LeaseRelease
from kvd.wire.limits import LONGEST_ID
from kvd.wire.registration import OpenReader
from kvd.worker.cause import Cause
from kvd.worker.later import together
from kvd.worker.orders import ClaimAnswer, StepOutcomes
from kvd.worker.remote import RemotePrefill, RemotePush
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings

RENEW_FRACTION = 0.3
"""A waiting claim is renewed when this part of the lease is left."""
MAX_AGAIN = 2
"""Smaller claims that may follow one that missed."""


class Claims:
    """All claims of one scheduler. Touched by the scheduler's step only."""

    def __init__(
        self, settings: ConnectorSettings, engine_id: str, session: SessionProtocol, known: KnownPeers
    ) -> None:
        self._settings = settings
        self._asker = ClaimAsker(settings, engine_id, session, known)
        self._claims: dict[str, Claim] = {}
        self._beside: dict[str, Claim] = {}
        """Claims whose loads began before they were answered. One is taken out at the first look after that."""
        self._answered: list[ClaimAnswer] = []
        self._declined: list[tuple[str, RemotePrefill]] = []
        self._transfers = TransferIds()
        self._expected: Callable[[Claim, VllmRequest], bool] = lambda *_: False

    def expect(self, expected: Callable[[Claim, VllmRequest], bool]) -> None:
        """``expected`` tells of a new claim whether the answer on it is of use to the scheduler alone."""
        self._expected = expected

    def get(self, request_id: str) -> Claim | None:
        """The claim of a request, if it has one."""
        return self._claims.get(request_id)

    def all(self) -> list[Claim]:
        """All claims as they are now, on any thread."""
        return list(self._claims.values())

    @property
    def loading(self) -> int:
        """Claims that are open, waiting for their turn or being loaded; on any thread."""
        return sum(claim.state is not ClaimState.RELEASED for claim in self.all())

    def readers(self, now: float) -> tuple[OpenReader, ...]:
        """The leases that are claimed now, on any thread, for a kvd that has to learn them again."""
        return tuple(
            OpenReader(
                lease_key(x.prefill),
                x.reader,
                max(0.0, x.lease.valid_until - now) or self._settings.lease_seconds,
            )
            for x in self.all()
            if x.lease.asked and x.state is not ClaimState.RELEASED
        )

    def begin(
        self,
        request_id: str,
        params: Mapping[str, Any],
        prompt: Prompt,
        *,
        state: bool,
        traceparent: str = "",
    ) -> None:
        """A request with a remote prefill arrived: ask for the peer, and claim its lease where the prompt is the same.

        Where the prefiller is known already the lease alone is asked for: its answer says whether that still holds.
        """
        self._begin(request_id, params, prompt, state=state)
        self._claims[request_id].traceparent = traceparent

    def _begin(self, request_id: str, params: Mapping[str, Any], prompt: Prompt, *, state: bool) -> None:
        if len(request_id) > LONGEST_ID:
            cause = f"the request's id has {len(request_id)} characters, kvd takes {LONGEST_ID}"
            self._claims[request_id] = Claim(
                request_id,
                NOBODY,
                max(1, prompt.tokens - 1),
                time.monotonic(),
                cause=Cause(cause, "BAD_PARAMS"),
            )
            return
        if wants_push(params):
            self._begin_push(request_id, params, prompt, state=state)
            return
        now, prefill = time.monotonic(), NOBODY
        try:
            prefill = read_remote_prefill(params, own_engine_id=self._asker.engine_id)
            if prefill.tokens <= prompt.tokens:  # else it is another prompt
                check_state(prefill, prompt.tokens, state=state)
        except BadParams as error:
            # Policy `fail` needs a load that can fail, so tokens are claimed here too.
            tokens = max(1, prompt.tokens - 1)
            self._claims[request_id] = Claim(
                request_id, prefill, tokens, now, cause=Cause(str(error), "BAD_PARAMS")
            )
            return
        tokens = min(prefill.tokens, prompt.tokens)
        claim = self._claims[request_id] = Claim(request_id, prefill, tokens, now, prompt)
        claim.alone = self._expected(claim, prompt.request)
        self._compare(claim)
        if claim.cause:
            return
        if claim.prompt is None:
            ask_lease(self._asker, claim, now, 0.0)
        else:
            ask_peer(self._asker, claim)

    def begin_found(self, request_id: str, prefill: RemotePrefill, reader: str) -> None:
        """Another engine holds a prefix of a request's prompt. There is no lease to claim: it is checked once read.

        Kvd has just named this engine. If it is known to fit, kvd is not asked for it again.
        """
        now = time.monotonic()
        claim = self._claims[request_id] = Claim(
            request_id, prefill, prefill.tokens, now, reader=reader, checked=True
        )
        claim.lease.valid_until = math.inf
        claim.peer_known = self._asker.known.fits(prefill)
        if not claim.peer_known:
            ask_peer(self._asker, claim)

    def decline(self, request_id: str, cause: Cause) -> None:
        """Nothing is to be loaded for a request that has just come."""
        if (claim := self._claims.get(request_id)) is not None:
            claim.cause = claim.cause or cause

    def _begin_push(self, request_id: str, params: Mapping[str, Any], prompt: Prompt, *, state: bool) -> None:
        """As `begin` where the prefiller pushes: its blocks are nothing to us, so there is no lease to claim.

        The prefiller compares the prompts, since the router does not carry its digest.
        """
        now, prefill, tokens = time.monotonic(), NOBODY, max(0, prompt.tokens - state)
        try:
            pushed = self._read_push(params)
            self._transfers.take(pushed.engine_id, pushed.transfer_id, now)
        except BadParams as error:
            cause = Cause(str(error), "BAD_PARAMS")
            self._claims[request_id] = Claim(request_id, prefill, max(1, tokens), now, cause=cause)
            return
        prefill = msgspec.structs.replace(
            NOBODY, engine_id=pushed.engine_id, host=pushed.host, port=pushed.port, tokens=tokens
        )
        claim = self._claims[request_id] = Claim(
            request_id, prefill, tokens, now, prompt, transfer_id=pushed.transfer_id
        )
        claim.lease.valid_until = math.inf
        ask_peer(self._asker, claim)

    def _read_push(self, params: Mapping[str, Any]) -> RemotePush:
        if self._settings.mode != "push":
            raise BadParams(
                f'kv_transfer_params ask for a push and the mode of this engine is "{self._settings.mode}": set "mode":'
                ' "push" in kv_connector_extra_config of both engines, or have the router pull'
            )
        return read_remote_push(params, own_engine_id=self._asker.engine_id)

    def _compare(self, claim: Claim) -> None:
        """Find out whether this is the prompt that was prefilled, as soon as the key is there for it."""
        prefill, prompt = claim.prefill, claim.prompt
        if prompt is None or claim.cause:
            return
        if prefill.tokens > prompt.tokens:
            other = f"the prompt that was prefilled has {prefill.tokens} tokens and this one {prompt.tokens}"
            claim.cause = mismatch(claim, other)
        elif key := self._asker.known.digest_key(prefill):
            if not claim.transfer_id and not is_sealed(key, prefill):
                claim.cause = unsealed(prefill)
                return
            digest = prompt.digest(key, claim.tokens)
            if claim.transfer_id:
                claim.digest = digest
            elif digest != prefill.digest:
                other = (
                    f"the {prefill.tokens} tokens that were prefilled are not those that this one begins with"
                )
                claim.cause = mismatch(claim, other)
            claim.prompt = None
        elif claim.peer_known:
            claim.cause = Cause(
                f"prefiller {prefill.engine_id}: its key for digests of prompts is not known here, so whether it"
                " prefilled this prompt cannot be told (see `kvctl workers`: has its scheduler registered?)",
                "PROMPT_UNCHECKED",
            )

    def advance(self, claim: Claim, now: float) -> None:
        """Look at what has come in for a claim; never waits."""
        if claim.pending and not claim.peer_known:
            look_at_peer(self._asker, claim, now)
            self._compare(claim)
        if claim.pending and not claim.lease.valid_until and claim.prompt is None:
            look_at_lease(self._asker, claim, now)
        if claim.pending and now - claim.began > self._settings.handshake_timeout:
            claim.cause = Cause(
                f"prefiller {claim.prefill.engine_id} at {claim.prefill.host}:{claim.prefill.port} was not known within"
                f" {self._settings.handshake_timeout:g} s (see `kvctl engines`, `kvctl status`)",
                "PEER_AWAY",
            )
        if not claim.pending and not claim.cause and claim.waiting and claim.lease.valid_until <= now:
            name = claim.prefill.request_id
            claim.cause = Cause(
                f"the lease of request {name} ran out while this one waited for its turn", "LEASE_ENDED"
            )

    def renew(self, now: float, scheduled: Container[str] = ()) -> list[Claim]:
        """Extend the leases of claims that wait for their turn while they run low.

        Also of those that vLLM does not ask for yet: all of its places may be taken. Gives the claims on which no load
        was ordered though their requests are ``scheduled``: nothing will be loaded of them.
        """
        seconds = self._settings.lease_seconds
        unused = []
        if self._beside:
            self._look_at_all_beside(now)
        for claim in self._claims.values():
            if not claim.waiting:
                continue
            if claim.request_id in scheduled:
                unused.append(claim)
                continue
            if claim.cause:
                continue
            if claim.pending:
                self.advance(claim, now)
                continue
            if claim.lease.answer is not None and claim.lease.answer.done():
                take_lease(self._asker, claim)
            low = claim.lease.valid_until - now < RENEW_FRACTION * seconds
            if low and claim.lease.answer is None and now - claim.lease.asked > 1.0:
                ask_lease(self._asker, claim, now, seconds)
        return unused

    def may_begin(self, claim: Claim) -> bool:
        """Whether a claim that is not answered yet may have its load begin (`kvd.vllm.scheduler.beside`)."""
        return may_begin(self._asker, claim)

    def order_load(self, claim: Claim) -> None:
        """A load of the claim is ordered, from its computed tokens on; beside the claim where that is not answered."""
        claim.go(ClaimState.LOADING)
        claim.kept, claim.beside = claim.tokens, claim.pending
        if claim.beside:
            self._beside[claim.request_id] = claim
        claim.ordered = time.monotonic()

    def _look_at_all_beside(self, now: float) -> None:
        for claim in list(self._beside.values()):
            if claim.beside and claim.state is ClaimState.LOADING:
                self._look_beside(claim, now)
            else:
                del self._beside[claim.request_id]

    def _look_beside(self, claim: Claim, now: float) -> None:
        self.advance(claim, now)
        if not claim.pending:
            claim.refused = claim.cause is not None
            self._answer(claim)

    def _answer(self, claim: Claim) -> None:
        claim.beside = False
        self._answered.append(answer_on(claim))

    def answers(self, claim: Claim, now: float) -> list[ClaimAnswer]:
        """Look now whether a claim beside its load was answered: what its workers are to be told. Clears that."""
        self._look_beside(claim, now)
        mine = [one for one in self._answered if one.request_id == claim.request_id]
        self._answered = [one for one in self._answered if one not in mine]
        return mine

    def new_answers(self, now: float) -> list[ClaimAnswer]:
        """Look now at all claims beside loads: `take_answered`."""
        if self._beside:
            self._look_at_all_beside(now)
        return self.take_answered()

    def ask_aloud(self, claim: Claim) -> None:
        """Claim once more: the workers are to hear of the answer after all."""
        if claim.alone and claim.pending and claim.lease.answer is not None:
            claim.alone = False
            ask_lease(self._asker, claim, time.monotonic(), 0.0)

    def take_answered(self) -> list[ClaimAnswer]:
        """What workers are to be told of loads that began before their claims were answered. Clears it."""
        answered, self._answered = self._answered, []
        return answered

    def note(self, outcomes: StepOutcomes) -> None:
        """Workers reported: why loads missed, and what was kept of them. The first cause counts, and the least."""
        for request_id, cause in outcomes.loads.items():
            if cause and (claim := self._claims.get(request_id)):
                claim.cause = claim.cause or cause
                if claim.beside:  # other workers may have it whole
                    self._answer(claim)
        for request_id, tokens in outcomes.prefixes.items():
            if claim := self._claims.get(request_id):
                claim.kept = min(tokens, claim.kept)

    def again(self, claim: Claim) -> bool:
        """Claim less after a miss, where a prefix came that may be read again; the lease is kept for it."""
        less = 0 < claim.kept < claim.tokens
        ours = claim.state is ClaimState.LOADING and not claim.beside  # else nothing of it may be used
        if not ours or claim.transfer_id or claim.in_step or not less or claim.again >= MAX_AGAIN:
            return False
        claim.go(ClaimState.WAITING)
        claim.tokens, claim.cause = claim.kept, None
        claim.again += 1
        return True

    def end(self, claim: Claim, result: Literal["done", "miss", "aborted"]) -> None:
        """The blocks are needed no longer: release the lease, or decline the push that was not ordered.

        The claim stays, released, until the request is forgotten.
        """
        if claim.transfer_id:
            self._transfers.end(claim.prefill.engine_id, claim.transfer_id, time.monotonic())
            if claim.waiting:
                self._declined.append((claim.transfer_id, claim.prefill))
        if self._answered:  # its workers have all reported, so what they were to be told is for nobody
            self._answered = [one for one in self._answered if one.request_id != claim.request_id]
        abandoned = claim.state is ClaimState.ABANDONED
        claim.go(ClaimState.RELEASED)
        if claim.lease.asked:  # else the lease may be another request's, which may still come for it
            release = LeaseRelease(key=lease_key(claim.prefill), reader=claim.reader, result=result)
            # Of a request that goes on here the next step gives the first token, and has more use for this process.
            waits = result == "done" and not abandoned
            after = together(now := time.monotonic()) - now if waits else 0.0
            self._asker.session.deliver(
                f"reader {claim.reader}", release, self._settings.lease_seconds * 2, after=after
            )
        if abandoned:
            self._claims.pop(claim.request_id, None)

    def take_declined(self) -> list[tuple[str, RemotePrefill]]:
        """Pushes of which nothing is wanted, by transfer id and prefiller. Clears them."""
        declined, self._declined = self._declined, []
        return declined

    def request_over(self, claim: Claim) -> None:
        """The request has finished or was aborted. While its load is on the way the claim stays, to be released."""
        if claim.state is ClaimState.LOADING:
            claim.go(ClaimState.ABANDONED)
            return
        if claim.waiting:
            self.end(claim, "aborted")  # never scheduled: nobody will read those blocks
        self._claims.pop(claim.request_id, None)
