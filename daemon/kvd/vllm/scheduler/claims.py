"""The decoding side's claims: one for each request that was prefilled elsewhere, from arrival to its end.

A claim becomes usable when the peer engine is known to fit (handshake), the params are found to be as it gave them
(seal) and its prompt to be this request's (digest), and its blocks are certain to be kept long enough (lease). Nothing
is claimed, and so nothing released, before these were compared: the request that a lease is for may be another one.
Only the prefiller's kvd can say that a lease is kept for one more reader, and while it is away a claim waits for it.

The same claim is never made again, whatever goes wrong. What missed may be followed by a smaller one, of the prefix
that came: at most `MAX_AGAIN` times, while the lease holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Mapping
from typing import Any, Literal

import msgspec

from kvd.client.errors import ClientError
from kvd.shown import logger
from kvd.vllm.errors import BadParams
from kvd.vllm.params import read_remote_prefill, read_remote_push, wants_push
from kvd.vllm.prompt.parts import Prompt
from kvd.vllm.prompt.seal import is_sealed
from kvd.vllm.scheduler.claim import NOBODY, Claim, ClaimState, check_state, mismatch, unsealed
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.scheduler.transfer_ids import TransferIds
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.limits import LONGEST_ID
from kvd.wire.registration import OpenReader
from kvd.worker.cause import Cause, is_to_ask_again, refusal_code, was_away
from kvd.worker.orders import StepOutcomes
from kvd.worker.remote import RemotePrefill, RemotePush
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

RENEW_FRACTION = 0.3
"""A waiting claim is renewed when this part of the lease is left."""
UNKNOWN_LEASE_RETRIES = 4
"""The announcement of a lease and the claim on it travel different ways.

An unknown lease is asked for again a few times.
"""
UNKNOWN_LEASE_PAUSE = 0.05
KVD_BACK_SECONDS = 2.0
"""How long a claim waits for a kvd that is away: one that is started again is back sooner."""
KVD_AWAY_PAUSE = 0.1
MAX_AGAIN = 2
"""Smaller claims that may follow one that missed."""


class Claims:
    """All claims of one scheduler. Touched by the scheduler's step only."""

    def __init__(
        self, settings: ConnectorSettings, engine_id: str, session: SessionProtocol, known: KnownPeers
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._session = session
        self._claims: dict[str, Claim] = {}
        self._known = known
        self._declined: list[tuple[str, RemotePrefill]] = []
        self._transfers = TransferIds()

    def get(self, request_id: str) -> Claim | None:
        """The claim of a request, if it has one."""
        return self._claims.get(request_id)

    def all(self) -> list[Claim]:
        """All claims as they are now, on any thread."""
        return list(self._claims.values())

    def readers(self, now: float) -> tuple[OpenReader, ...]:
        """The leases that are claimed now, on any thread, for a kvd that has to learn them again."""
        return tuple(
            OpenReader(
                self._key(x.prefill),
                x.reader,
                max(0.0, x.lease.valid_until - now) or self._settings.lease_seconds,
            )
            for x in self.all()
            if x.lease.asked and x.state is not ClaimState.RELEASED
        )

    def begin(self, request_id: str, params: Mapping[str, Any], prompt: Prompt, *, state: bool) -> None:
        """A request with a remote prefill arrived: ask for the peer, and claim its lease where the prompt is the same.

        Both at once where the prefiller's key is known already.
        """
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
            prefill = read_remote_prefill(params, own_engine_id=self._engine_id)
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
        self._compare(claim)
        if not claim.cause:
            self._ask_peer(claim)
            if claim.prompt is None:
                self._ask_lease(claim, now, 0.0)

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
        self._ask_peer(claim)

    def _read_push(self, params: Mapping[str, Any]) -> RemotePush:
        if self._settings.mode != "push":
            raise BadParams(
                f'kv_transfer_params ask for a push and the mode of this engine is "{self._settings.mode}": set "mode":'
                ' "push" in kv_connector_extra_config of both engines, or have the router pull'
            )
        return read_remote_push(params, own_engine_id=self._engine_id)

    def _compare(self, claim: Claim) -> None:
        """Find out whether this is the prompt that was prefilled, as soon as the key is there for it."""
        prefill, prompt = claim.prefill, claim.prompt
        if prompt is None or claim.cause:
            return
        if prefill.tokens > prompt.tokens:
            other = f"the prompt that was prefilled has {prefill.tokens} tokens and this one {prompt.tokens}"
            claim.cause = mismatch(claim, other)
        elif key := self._known.digest_key(prefill):
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
            self._look_at_peer(claim, now)
            self._compare(claim)
        if claim.pending and not claim.lease.valid_until and claim.prompt is None:
            self._look_at_lease(claim, now)
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
                self._take_lease(claim)
            low = claim.lease.valid_until - now < RENEW_FRACTION * seconds
            if low and claim.lease.answer is None and now - claim.lease.asked > 1.0:
                self._ask_lease(claim, now, seconds)
        return unused

    def order_load(self, claim: Claim) -> None:
        """A load of the claim is ordered, from its computed tokens on."""
        claim.state, claim.kept = ClaimState.LOADING, claim.tokens

    def note(self, outcomes: StepOutcomes) -> None:
        """Workers reported: why loads missed, and what was kept of them. The first cause counts, and the least."""
        for request_id, cause in outcomes.loads.items():
            if cause and (claim := self._claims.get(request_id)):
                claim.cause = claim.cause or cause
        for request_id, tokens in outcomes.prefixes.items():
            if claim := self._claims.get(request_id):
                claim.kept = min(tokens, claim.kept)

    def again(self, claim: Claim) -> bool:
        """Claim less after a miss, where a prefix came that may be read again; the lease is kept for it."""
        less = 0 < claim.kept < claim.tokens
        if claim.state is not ClaimState.LOADING or claim.transfer_id or not less or claim.again >= MAX_AGAIN:
            return False
        claim.tokens, claim.cause, claim.state = claim.kept, None, ClaimState.WAITING
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
        abandoned, claim.state = claim.state is ClaimState.ABANDONED, ClaimState.RELEASED
        if claim.lease.asked:  # else the lease may be another request's, which may still come for it
            release = LeaseRelease(key=self._key(claim.prefill), reader=claim.reader, result=result)
            self._session.deliver(f"reader {claim.reader}", release, self._settings.lease_seconds * 2)
        if abandoned:
            self._claims.pop(claim.request_id, None)

    def take_declined(self) -> list[tuple[str, RemotePrefill]]:
        """Pushes of which nothing is wanted, by transfer id and prefiller. Clears them."""
        declined, self._declined = self._declined, []
        return declined

    def request_over(self, claim: Claim) -> None:
        """The request has finished or was aborted. While its load is on the way the claim stays, to be released."""
        if claim.state is ClaimState.LOADING:
            claim.state = ClaimState.ABANDONED
            return
        if claim.waiting:
            self.end(claim, "aborted")  # never scheduled: nobody will read those blocks
        self._claims.pop(claim.request_id, None)

    def _ask_peer(self, claim: Claim) -> None:
        prefill = claim.prefill
        claim.peer = self._session.call(
            GetPeer(
                local_engine=self._engine_id,
                engine_id=prefill.engine_id,
                endpoint=Endpoint(prefill.host, prefill.port),
                generation=prefill.generation,
                keyed=True,
            ),
            self._settings.handshake_timeout,
        )

    def _look_at_peer(self, claim: Claim, now: float) -> None:
        prefill = claim.prefill
        if claim.peer is not None and claim.peer.done():
            try:
                answer = claim.peer.result()
            except ClientError as error:
                if not (was_away(error) and self._known.fits(prefill)):
                    if is_to_ask_again(error):
                        claim.peer, claim.peer_due = None, now + KVD_AWAY_PAUSE
                        return
                    hint = f"; {error.hint}" if error.hint else ""
                    claim.cause = Cause(
                        f"prefiller {prefill.engine_id}: {error.message}{hint}", refusal_code(error)
                    )
                    return
            else:
                if not isinstance(answer, PeerReady):
                    claim.cause = Cause(
                        f"prefiller {prefill.engine_id}: kvd answered {type(answer).__name__}", "PEER_REFUSED"
                    )
                    return
                self._known.learn(answer.peer, Endpoint(prefill.host, prefill.port))
                if claim.transfer_id:  # the router cannot know it
                    claim.prefill = msgspec.structs.replace(prefill, generation=answer.peer.generation)
                claim.handshake_seconds = answer.seconds
            claim.peer_known = True
        elif not self._session.state.connected and self._known.fits(prefill):
            claim.peer_known = True  # kvd is away; what it told us still holds
        elif claim.peer is None and now >= claim.peer_due:
            self._ask_peer(claim)

    def _look_at_lease(self, claim: Claim, now: float) -> None:
        if claim.lease.answer is not None and claim.lease.answer.done():
            self._take_lease(claim)
        elif claim.lease.answer is None and now >= claim.lease.due:
            self._ask_lease(claim, now, 0.0)
        state = self._session.state
        if claim.pending and not state.connected and now - state.since > KVD_BACK_SECONDS:
            self._nobody_to_ask(claim, "kvd is away")

    def _take_lease(self, claim: Claim) -> None:
        future, claim.lease.answer = claim.lease.answer, None
        try:
            answer = future.result() if future is not None else None
        except ClientError as error:
            log.info("claim of request %s: %s", claim.request_id, error.message)
            if claim.lease.valid_until:
                return  # an extension: what was certain before still is
            if was_away(error):
                self._ask_again_soon(claim, error)
            else:
                claim.cause = Cause(
                    f"lease of request {claim.prefill.request_id}: {error.message}", "LEASE_ENDED"
                )
            return
        if not isinstance(answer, LeaseClaimed):
            claim.cause = Cause(
                f"lease of request {claim.prefill.request_id}: kvd answered {type(answer).__name__}",
                "LEASE_ENDED",
            )
        elif answer.seconds > 0:
            claim.lease.valid_until = claim.lease.asked + answer.seconds - self._settings.lease_margin
        elif claim.lease.retries < UNKNOWN_LEASE_RETRIES and not claim.lease.valid_until:
            claim.lease.retries += 1
            claim.lease.due = time.monotonic() + UNKNOWN_LEASE_PAUSE * claim.lease.retries
        elif (
            answer.ended or not claim.lease.valid_until
        ):  # a kvd that was just started may not know the lease yet
            prefill, why = claim.prefill, answer.reason or "no such lease"
            claim.cause = Cause(
                f"prefiller {prefill.engine_id} no longer keeps blocks of request {prefill.request_id}: {why}",
                "LEASE_ENDED",
            )

    def _ask_again_soon(self, claim: Claim, error: ClientError) -> None:
        """The prefiller's kvd is away: the claim is sent again while that may be about to come back."""
        now = time.monotonic()
        if now - max(claim.began, self._session.state.since) > KVD_BACK_SECONDS:
            self._nobody_to_ask(claim, error.message)
        claim.lease.due = now + KVD_AWAY_PAUSE

    @staticmethod
    def _nobody_to_ask(claim: Claim, why: str) -> None:
        """Another decoder with the same params may end the lease meanwhile, and the blocks be computed over."""
        name = claim.prefill.request_id
        claim.cause = Cause(
            f"whether the blocks of request {name} are kept cannot be asked: {why}", "PEER_AWAY"
        )

    def _ask_lease(self, claim: Claim, now: float, extend: float) -> None:
        claim.lease.asked = now
        claim.lease.answer = self._session.call(
            LeaseClaim(key=self._key(claim.prefill), reader=claim.reader, extend_seconds=extend),
            self._settings.handshake_timeout,
        )

    @staticmethod
    def _key(prefill: RemotePrefill) -> LeaseKey:
        return LeaseKey(
            engine_id=prefill.engine_id,
            request_id=prefill.request_id,
            endpoint=Endpoint(prefill.host, prefill.port),
        )
