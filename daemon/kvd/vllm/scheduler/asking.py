"""What a claim asks kvd, for its prefiller and for its lease, and what the answers mean for it.

Nothing here waits: a question's future is looked at until it has an answer.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from kvd.client.errors import ClientError
from kvd.shown import logger
from kvd.vllm.scheduler.claim import Claim, LeaseHold
from kvd.vllm.scheduler.known_peers import KnownPeers
from kvd.vllm.vllm_types import lookahead_of
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed
from kvd.worker.cause import Cause, is_to_ask_again, refusal_code, was_away
from kvd.worker.remote import RemotePrefill
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

UNKNOWN_LEASE_RETRIES = 4
"""The announcement of a lease and the claim on it travel different ways.

An unknown lease is asked for again a few times.
"""
UNKNOWN_LEASE_PAUSE = 0.05
KVD_BACK_SECONDS = 2.0
"""How long a claim waits for a kvd that is away: one that is started again is back sooner."""
KVD_AWAY_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class ClaimAsker:
    """On whose behalf kvd is asked: an engine, its session, and what is known of its peers already."""

    settings: ConnectorSettings
    engine_id: str
    session: SessionProtocol
    known: KnownPeers


def ask_peer(asker: ClaimAsker, claim: Claim) -> None:
    """Ask kvd for the prefiller: of which generation it is, whether it fits, and its key."""
    prefill = claim.prefill
    claim.peer = asker.session.call(
        GetPeer(
            local_engine=asker.engine_id,
            engine_id=prefill.engine_id,
            endpoint=Endpoint(prefill.host, prefill.port),
            generation=prefill.generation,
            keyed=True,
        ),
        asker.settings.handshake_timeout,
    )


def look_at_peer(asker: ClaimAsker, claim: Claim, now: float) -> None:
    """Take what kvd said of the prefiller, if it has; ask again where that is due."""
    prefill = claim.prefill
    if claim.peer is not None and claim.peer.done():
        try:
            answer = claim.peer.result()
        except ClientError as error:
            if not (was_away(error) and asker.known.fits(prefill)):
                if is_to_ask_again(error):
                    claim.peer, claim.peer_due = None, now + KVD_AWAY_PAUSE
                    return
                claim.cause = Cause(f"prefiller {prefill.engine_id}: {error.with_hint}", refusal_code(error))
                return
        else:
            if not isinstance(answer, PeerReady):
                claim.cause = Cause(
                    f"prefiller {prefill.engine_id}: kvd answered {type(answer).__name__}", "PEER_REFUSED"
                )
                return
            asker.known.learn(answer.peer, Endpoint(prefill.host, prefill.port))
            if claim.transfer_id:  # the router cannot know it
                claim.prefill = msgspec.structs.replace(prefill, generation=answer.peer.generation)
                _leave_last(claim, lookahead_of(answer.peer.engine.facts))
            claim.handshake_seconds = answer.seconds
        claim.peer_known = True
    elif not asker.session.state.connected and asker.known.fits(prefill):
        claim.peer_known = True  # kvd is away; what it told us still holds
    elif claim.peer is None and now >= claim.peer_due and not _lease_may_tell(claim):
        ask_peer(asker, claim)


def _lease_may_tell(claim: Claim) -> bool:
    """Whether the answer on the lease is awaited, which also says that the prefiller is who it was."""
    return claim.prompt is None and not claim.checked and claim.lease.answer is not None


def _leave_last(claim: Claim, left: int) -> None:
    """Claim nothing of the last tokens that the prefiller of a push does not compute; its facts say how many."""
    tokens = 0 if claim.prompt is None else claim.prompt.tokens - left
    if 0 < tokens < claim.tokens:  # of a shorter prompt the prefiller leaves nothing out
        claim.tokens = tokens
        claim.prefill = msgspec.structs.replace(claim.prefill, tokens=tokens)


def look_at_lease(asker: ClaimAsker, claim: Claim, now: float) -> None:
    """Take the answer on a lease that nobody has confirmed yet, if it is there; ask again where that is due."""
    if claim.lease.answer is not None and claim.lease.answer.done():
        take_lease(asker, claim)
        if claim.lease.valid_until and not claim.peer_known and claim.peer is None and now >= claim.peer_due:
            ask_peer(asker, claim)  # the answer told nothing of it
    elif claim.lease.answer is None and now >= claim.lease.due:
        ask_lease(asker, claim, now, 0.0)
    state = asker.session.state
    if claim.pending and not state.connected and now - state.since > KVD_BACK_SECONDS:
        _nobody_to_ask(claim, "kvd is away")


def take_lease(asker: ClaimAsker, claim: Claim) -> None:
    """Take the answer on the lease, a first one or an extension's."""
    future, claim.lease.answer = claim.lease.answer, None
    try:
        answer = future.result() if future is not None else None
    except ClientError as error:
        log.info("claim of request %s: %s", claim.request_id, error.message)
        if claim.lease.valid_until:
            return  # an extension: what was certain before still is
        if was_away(error):
            _ask_again_soon(asker, claim, error)
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
        return
    if answer.generation and answer.generation == claim.prefill.generation:
        claim.peer_known = True
    # What was read before this answer was read without the lease: no later one makes that good.
    sure = answer.ended and claim.beside
    if answer.seconds > 0:
        claim.lease.valid_until = claim.lease.asked + answer.seconds - asker.settings.lease_margin
    elif claim.lease.retries < UNKNOWN_LEASE_RETRIES and not (claim.lease.valid_until or sure):
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


def _ask_again_soon(asker: ClaimAsker, claim: Claim, error: ClientError) -> None:
    """The prefiller's kvd is away: the claim is sent again while that may be about to come back."""
    now = time.monotonic()
    if now - max(claim.began, asker.session.state.since) > KVD_BACK_SECONDS:
        _nobody_to_ask(claim, error.message)
    claim.lease.due = now + KVD_AWAY_PAUSE


def _nobody_to_ask(claim: Claim, why: str) -> None:
    """Another decoder with the same params may end the lease meanwhile, and the blocks be computed over."""
    name = claim.prefill.request_id
    claim.cause = Cause(f"whether the blocks of request {name} are kept cannot be asked: {why}", "PEER_AWAY")


def ask_lease(asker: ClaimAsker, claim: Claim, now: float, extend: float) -> None:
    """Claim the lease, or renew it so that it lasts ``extend`` seconds more.

    Workers hear how a first claim went that is not ``alone``.
    """
    claim.lease.asked = now
    claim.lease.answer = asker.session.call(
        LeaseClaim(
            key=lease_key(claim.prefill),
            reader=claim.reader,
            extend_seconds=extend,
            generation="" if extend else claim.prefill.generation,
            alone=claim.alone,
        ),
        asker.settings.handshake_timeout,
    )
    if claim.alone:
        claim.lease.answer.add_done_callback(functools.partial(_came, claim.lease))


def _came(lease: LeaseHold, _: Future[Message]) -> None:
    """On the session's thread: nobody else looks before the next step."""
    lease.came = time.monotonic()


def lease_key(prefill: RemotePrefill) -> LeaseKey:
    """What names a prefill's lease, and the kvd that has it."""
    return LeaseKey(
        engine_id=prefill.engine_id,
        request_id=prefill.request_id,
        endpoint=Endpoint(prefill.host, prefill.port),
    )
