"""A miss that no worker heard of: the scheduler's record of a claim on which no load was ordered."""

from __future__ import annotations

import time

from kvd.vllm.scheduler.claim import Claim
from kvd.wire.transfer import SCHEDULER_RANK, ReportTransfers, TransferRecord, bounded
from kvd.worker.cause import code_of, text_of
from kvd.worker.session import SessionProtocol

UNLOADED_KEPT_SECONDS = 600.0
"""How long such a record is kept for a kvd that is away."""


def deliver_unloaded(
    claim: Claim, session: SessionProtocol, engine_id: str, backend: str, incarnation: str
) -> TransferRecord:
    """Have the ledger keep the claim; the record of it."""
    entry = record_unloaded(claim, engine_id=engine_id, backend=backend)
    message = ReportTransfers(incarnation=incarnation, records=(entry,))
    session.deliver(f"transfer {entry.transfer_id}", message, UNLOADED_KEPT_SECONDS)
    return entry


def record_unloaded(claim: Claim, *, engine_id: str, backend: str) -> TransferRecord:
    """The claim as the ledger keeps it; its only stage is the wait for the prefiller and the lease."""
    prefill, waited = claim.prefill, time.monotonic() - claim.began
    return bounded(
        TransferRecord(
            transfer_id=f"{claim.request_id}@{SCHEDULER_RANK}"
            + (f"#{claim.again + 1}" if claim.again else ""),
            request_id=claim.request_id,
            local_engine=engine_id,
            local_rank=SCHEDULER_RANK,
            remote_engine=prefill.engine_id,
            remote_generation=prefill.generation,
            remote_request_id=claim.transfer_id or prefill.request_id,
            backend=backend,
            mode="push" if claim.transfer_id else "pull",
            state="miss",
            cause=text_of(claim.cause),
            code=code_of(claim.cause),
            started=time.time() - waited,
            tokens=max(0, claim.tokens - claim.computed),
            stages={"handshake": waited},
            moments={"reported": waited},
            attempts=0,
            traceparent=claim.traceparent,
        )
    )
