"""The next thing to do for one target: post, offer, poll, or bring it to an end. The sender calls these in turns."""

from __future__ import annotations

from collections.abc import Collection

from kvd.backends.contract import State
from kvd.backends.errors import BackendError
from kvd.shown import logger
from kvd.topology.errors import TopologyError
from kvd.worker.cause import Cause, from_error
from kvd.worker.load import state_of
from kvd.worker.peers.held import Evict
from kvd.worker.push.computed import Outgoing
from kvd.worker.push.milestones import Computed
from kvd.worker.push.target import MOST_FLYING, PushTarget, TargetPhase, due, next_post, readable, written
from kvd.worker.push.write_lanes import WriteLanes
from kvd.worker.staging import Stager

log = logger(__name__)

MAX_FAILURES = 3
"""Posts that could not be started before their target is given up."""
QUIESCE_SECONDS = 1.0
"""Seconds for which a post of a target that is over may end by itself before it is left to the decoder's window."""


def advance(
    target: PushTarget,
    computed: Computed | None,
    outgoing: Outgoing,
    lanes: WriteLanes,
    stager: Stager | None,
    now: float,
) -> None:
    """Send what is computed and not sent, as far as the transfer stands; None where it is not known yet."""
    if computed is None:
        if now > target.deadline:
            target.close(Cause("the prefiller was not sent this request in time", "PREFILL_ENDED"))
        return
    wanted = target.announce.tokens
    target.sums = target.sums or computed.sums
    target.request_id = computed.request_id or target.request_id
    target.traceparent = computed.traceparent or target.traceparent
    if computed.over:
        target.close(computed.over)
    elif computed.total != wanted:
        other = f"the prefiller's prompt has {computed.total} tokens, announced were {wanted}"
        target.close(Cause(other, "PROMPT_MISMATCH"))
    elif computed.digest != target.announce.digest:
        other = f"the {wanted} tokens of the prefiller's prompt are not those of the decoder's"
        target.close(Cause(f"{other}: a transfer id is for one prompt", "PROMPT_MISMATCH"))
    elif now > target.deadline:
        target.close(Cause("the decoder's time for it is over", "TOO_LATE"))
    elif target.direct:
        _offer(target, computed, outgoing, stager)
    else:
        _post(target, computed, outgoing, lanes)


def awaits_device(target: PushTarget, computed: Computed, *, woken: bool) -> bool:
    """Whether to look again for what the device has yet to do: each look takes the step's GIL.

    Where the decoder reads by itself the last tokens wait for the scheduler's word (`Computed.kept`), which is later.
    ``woken``: for what comes before that the sender is woken when the device has done it.
    """
    if not target.direct or computed.kept:
        return bool(computed.coming)
    return not woken and 0 < computed.coming < target.announce.tokens


def poll(target: PushTarget, outgoing: Outgoing, lanes: WriteLanes) -> None:
    """Look at what is under way.

    Of a layer a post counts when all before it have landed: where both end between two looks, or a backend ends them in
    any order, the later one is seen first, and what it completes is not there yet.
    """
    unwritten: set[str] = set()
    for post in list(target.flying):
        state = state_of(post.transfer, post.lane)
        if state is State.FAILED:
            target.flying.remove(post)
            target.dirty = True
            lanes.leave()
            target.close(Cause(f"{post.transfer.peer}: {post.transfer.reason}", "TRANSFER_FAILED"))
        elif state is State.PENDING or not unwritten.isdisjoint(post.layers):
            unwritten.update(post.layers)
        else:
            target.flying.remove(post)
            if target.cause is not None or target.dirty:
                continue  # what was posted before it may have failed
            if post.epoch == outgoing.epoch(target.key.transfer_id):
                written(target, post.layers)
            elif not target.flying:
                target.lose_posts()
    if target.phase is TargetPhase.SENDING and not target.direct and not target.flying and target.complete:
        target.settle()


def quiesce(target: PushTarget, lanes: WriteLanes, now: float) -> None:
    """Bring a target to its end that is closing: when nothing of it is under way, or what is will not end."""
    if target.flying and now > target.since + QUIESCE_SECONDS:
        target.flying.clear()
        target.dirty = True
        lanes.leave()
    if not target.flying:
        target.settle()


def evict(order: Evict, targets: Collection[PushTarget], lanes: WriteLanes) -> None:
    """Leave the lane, to be closed when nothing is under way on it; while something is owed, only for a cause."""
    concerned = [target for target in targets if order.concerns(target.announce.generations[1])]
    if order.cause is not None:
        for target in concerned:
            target.close(order.cause)
    if not targets or (concerned and order.cause is not None):
        lanes.leave()


def _offer(target: PushTarget, computed: Computed, outgoing: Outgoing, stager: Stager | None) -> None:
    """Tell the decoder what it can read; it says itself when it has everything."""
    if target.pushes is None:
        return
    if target.epoch not in (None, computed.epoch):
        # What it reads now is overwritten, and nothing says which of it.
        why = "the prefiller preempted its request or began it anew while its blocks were read"
        target.close(Cause(why, "PREFILL_ENDED"))
        return
    target.epoch = computed.epoch
    ends = due(target, computed)
    if not computed.kept:
        ends = _before_kept(target, computed, ends)
    if ends and stager is not None:
        chunks = {name: (target.posted.get(name, 0), end) for name, end in ends.items()}
        try:
            stager.stage_layers(computed.blocks, chunks, target.announce.tokens)
        except (BackendError, TopologyError) as error:
            target.close(from_error(error, "its blocks cannot be copied for the decoder"))
            return
        if outgoing.epoch(target.key.transfer_id) != computed.epoch:
            return  # overwritten while they were copied: the next look closes it
    if ends:
        readable(target, computed, ends)
    elif not target.pushes:
        target.settle()


def _before_kept(target: PushTarget, computed: Computed, ends: dict[str, int]) -> dict[str, int]:
    """What of that may be read before the blocks are certain to stay: never all that is left.

    A decoder that has everything relies on it. While it waits for more it hears if the blocks are lost meanwhile.
    """
    total = target.announce.tokens
    found = {name: end for name, end in ends.items() if end < total or name in computed.early}
    missing = any(found.get(name, target.posted.get(name, 0)) < total for name in target.pushes or ())
    if found and not missing:
        found.popitem()
    return found


def _post(target: PushTarget, computed: Computed, outgoing: Outgoing, lanes: WriteLanes) -> None:
    while target.phase is TargetPhase.SENDING and _may_post(target, computed, outgoing):
        if target.looked is computed:
            break
        ends = due(target, computed)
        if not ends:
            target.looked = computed if target.pushes is not None else None
            break
        target.source = computed.blocks
        try:
            layers, rows = next_post(target, computed, ends)
            if not len(rows):  # of a rank that no token of this chunk is for
                if any(not layers.keys().isdisjoint(post.layers) for post in target.flying):
                    break  # they are written when what was posted before is
                target.posted.update(layers)
                written(target, layers)
                continue
            post = lanes.post(target, rows, layers, computed.epoch)
        except TopologyError as error:
            target.close(from_error(error, "its blocks do not fit"))
        except BackendError as error:
            _refused(target, error.message, lanes)
        else:
            target.flying.append(post)
            target.posted.update(layers)
            poll(target, outgoing, lanes)
    poll(target, outgoing, lanes)


def _may_post(target: PushTarget, computed: Computed, outgoing: Outgoing) -> bool:
    """Not from blocks that the request has lost, nor beside what reads those: which lands last is not certain."""
    flying = target.flying
    if len(flying) >= MOST_FLYING or any(post.epoch != computed.epoch for post in flying):
        return False
    return outgoing.epoch(target.key.transfer_id) == computed.epoch


def _refused(target: PushTarget, reason: str, lanes: WriteLanes) -> None:
    """A post could not be started, so nothing of it moves: again on a new lane, or not at all."""
    target.failures += 1
    lanes.leave()
    if target.failures >= MAX_FAILURES:
        target.close(Cause(reason, "TRANSFER_FAILED"))
        return
    name, decoder = target.key.transfer_id, target.key.decoder
    log.info("push of %s to %s failed (%s); trying again on a new lane", name, decoder, reason)
