"""What the workers are told to load for a claim that has blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from kvd.topology.blocks import wanted
from kvd.vllm.memory.groups import GroupFacts, has_state
from kvd.vllm.scheduler.claim import Claim
from kvd.vllm.vllm_types import BlockTable
from kvd.worker.cause import Cause
from kvd.worker.orders import Fault, LoadOrder, plain
from kvd.worker.settings import ConnectorSettings


def load_order(
    claim: Claim,
    groups: Sequence[GroupFacts],
    table: BlockTable,
    external: int,
    settings: ConnectorSettings,
    fault: Fault | None,
    cached: Sequence[int],
    last_use: Callable[[AbstractSet[int]], int | None],
) -> LoadOrder:
    """The order for ``external`` tokens behind those that are computed, into the blocks of ``table``.

    Of each group the first ``cached`` blocks of the table are of the prefix cache; not given, they are those of the
    computed tokens. That many has full attention, other groups may have fewer. The order has the time of the
    ``settings``, or less where the lease ends before. Beside its claim the lease's end is not known yet. ``last_use``
    gives the last step that may touch blocks which vLLM had free. After a miss a request has kept its own, and steps
    may have computed into them.
    """
    now, tokens = time.monotonic(), claim.computed + external
    most = settings.push_timeout if claim.transfer_id else settings.load_timeout
    seconds = most if claim.beside else min(most, claim.lease.valid_until - now)
    lists = {
        index: wanted(
            g.kind,
            g.block_size,
            g.window,
            table[index],
            tokens=tokens,
            computed=min(claim.computed, cached[index] * g.block_size) if cached else claim.computed,
            scratch_blocks=g.scratch_blocks,
        )
        for index, g in enumerate(groups)
    }
    blocks = plain(lists)
    return LoadOrder(
        request_id=claim.request_id,
        prefill=claim.prefill,
        groups=blocks,
        tokens=tokens,
        seconds=seconds,
        claimed=now,
        handshake_seconds=claim.handshake_seconds,
        refused=claim.cause,
        transfer_id=claim.transfer_id,
        digest=claim.digest,
        computed=claim.computed,
        fault=fault,
        again=claim.again,
        unanswered=claim.beside,
        reader=claim.reader if claim.beside or claim.checked else "",
        asked_before=now - claim.lease.asked if claim.beside else 0.0,
        checked=claim.checked,
        traceparent=claim.traceparent,
        after=None if claim.again else last_use({block for _, ids in blocks.values() for block in ids}),
        in_step=claim.in_step,
    )


def other_state(claim: Claim, groups: Sequence[GroupFacts], external: int) -> Cause | None:
    """The cause where vLLM would go on behind another token than the one that the prefiller's state is of."""
    tokens = claim.computed + external
    if tokens == claim.prefill.tokens or claim.cause or not has_state(groups):
        return None
    return Cause(
        f"vLLM asks for {tokens} tokens and the prefiller's state is the one after {claim.prefill.tokens}: no state"
        " fits another position (does another connector or setting shorten what is loaded?)",
        "DOES_NOT_FIT",
    )
