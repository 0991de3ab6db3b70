"""Loads that begin before their claim is answered, and why their bytes may be used once it is.

The params of a request name the blocks and the lease on them. Where the prefiller is known already, and seal and digest
hold, its load is ordered in the first step that sees the request, and the claim is under way beside it. A worker
reports nothing of such a load before it was told how the claim was answered. Until then vLLM waits, and neither uses
the load's blocks nor gives them to another.

The scheduler tells its workers with a step. That takes another step once the answer is there, so kvd tells the workers
of its host of a confirmation, at once. Whoever comes second says nothing new, but for a refusal by the scheduler: it
counts as long as the load is not reported. A scheduler that has its only worker at hand tells it before a step; if
such a load is short, kvd tells nobody (`kvd.vllm.scheduler.in_step`).

**Why an answer that comes later is enough.** The prefiller's scheduler opens a lease once, before anybody has its
params, and frees the blocks only after the lease has ended. A lease that has ended is never opened again: its scheduler
forgets it, lists it to no kvd, and refuses to extend it. So a lease that is open at one moment was open at every moment
since the params were made. The answer says two things: the lease was open at a moment after the claim was sent, and it
stays open for some time from then on. What was read from the params on until that end was read under the lease.

**What is asked of the answer.** The same as of one that is waited for. The prefiller's kvd confirms the lease, kvd
confirms the prefiller's generation, and all that was read came before the lease's end. Anything else is a miss.

**What may happen meanwhile.**

- Another reader, the last so far, releases the lease before our claim arrives: the claim is refused, a miss. After it
  arrived we are a reader, and the lease stays.
- The lease ended and one of the same name is opened, since a request's id came twice: the first answer that says
  "ended" counts, and no further one is asked for.
- The prefiller's kvd is killed: the next one confirms what the scheduler lists, which is no lease that has ended.
- That kvd stands still, the lease runs out, and the scheduler frees the blocks by its own clock: when kvd goes on it
  has no time left to give. It asks the scheduler, which says no.
- The prefiller's kvd does not know the lease yet, as its announcement is slower than the claim: it is asked again a few
  times, as ever. The blocks are kept all the while.
- A claim is sent twice, since the first was lost: the lease's end counts from the sending that was answered.
- The lease ends after it was confirmed, and the read goes on: the confirmed end is the load's deadline. Where that is
  over when the worker hears of it, a load that had not ended by then is a miss.
- The prefiller restarts: a lane is of one generation, and the generation is part of the answer. Kvd tells workers of a
  lease only if it knows the prefiller in the generation that the params name: a lease may be of the same name.
- Kvd's word comes before the load's order, or for a claim of which nothing is loaded: it is kept a while.
- Kvd's word comes late, since kvd or the worker stood still: what it promises counts from before the claim was sent.
- A kvd is away: two seconds, then a miss. No load begins while ours is known to be away.
- The claim is refused while bytes are on the way: what is not posted is not read. What is has a moment to end, else its
  lane is closed; only then it is reported.
- A part of the load missed, and pieces before it came: they would be used, so this waits for the answer too. Where no
  piece came, nothing can be used, and the miss is reported at once.
- The request is aborted: nobody uses anything, so it is reported when nothing can land any more. The release may
  overtake the claim, which kvd then refuses (`kvd.service.engines.leases`).
- One worker of several missed: the others hear that theirs is of no use.
- Less is claimed again after a miss: only where the claim was confirmed, and it counts as answered then.
- Checksums are due: they are compared after the answer, since blocks that were given away would differ.
- The answer and the load's end meet: one lock decides, on the worker (`kvd.worker.pull.unanswered`).
"""

from __future__ import annotations

import time

from kvd.vllm.scheduler.asking import ClaimAsker
from kvd.vllm.scheduler.claim import Claim
from kvd.worker.orders import ClaimAnswer
from kvd.worker.remote import RemotePrefill


def may_begin(asker: ClaimAsker, claim: Claim) -> bool:
    """Whether the load of a claim may begin though the claim is not answered yet.

    Not where an answer was that the lease is unknown or that nobody could be asked, nor where the params themselves say
    that the lease has ended. Hosts' clocks may differ: one that is wrong costs the wait for the answer, or a miss.
    """
    prefill, lease = claim.prefill, claim.lease
    asked = lease.answer is not None and not lease.retries and not lease.due
    return (
        claim.pending
        and not claim.transfer_id
        and claim.prompt is None
        and asked
        and asker.session.state.connected
        and asker.known.fits(prefill)
        and _is_promised(prefill, time.time())
    )


def answer_on(claim: Claim) -> ClaimAnswer:
    """What the workers are told, once the claim of a load that they have begun was answered."""
    seconds = 0.0 if claim.cause else claim.lease.valid_until - claim.ordered
    ago = time.monotonic() - claim.lease.came if claim.lease.came else 0.0
    return ClaimAnswer(claim.request_id, seconds, claim.cause, ago)


def _is_promised(prefill: RemotePrefill, now: float) -> bool:
    return now < prefill.lease_opened + prefill.lease_seconds
