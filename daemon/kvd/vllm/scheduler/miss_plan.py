"""What an operator's order would do to an engine: which loads it takes, or why it is refused. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvd.vllm.scheduler.claim import Claim, ClaimState
from kvd.wire.identity import Role
from kvd.wire.order import AllWaiting, ForceMiss, ForcePlan, OneRequest, PlannedMiss
from kvd.wire.reply import Refused, refusal

_ADDED = re.compile(r"-[0-9a-f]{8}")
"""What vLLM puts behind the id of a request that came from outside."""


@dataclass(frozen=True, slots=True)
class DecodingEngine:
    """What an order is judged by. ``keeps_prefix``: as `kvd.vllm.memory.groups.keeps_prefix`.

    Nothing is asked of the build of vLLM: on one that cannot recover the connector does not start
    (`kvd.vllm.builds.probe`).
    """

    engine_id: str
    incarnation: str
    policy: str
    mode: str
    groups: int
    keeps_prefix: bool
    role: Role = "both"


def make_plan(
    message: ForceMiss,
    engine: DecodingEngine,
    claims: Sequence[Claim],
    requests: Sequence[str],
    finished: Sequence[str],
) -> ForcePlan | Refused:
    """What the order does with these claims.

    ``requests`` are ids of those whose KV is or was elsewhere, ``finished`` of those that have ended: for the reason of
    a refusal.
    """
    if engine.policy != "recompute":
        return refusal(
            code="KVD-FORCE-POLICY",
            message=f"kv_load_failure_policy of engine {engine.engine_id} is {engine.policy!r}: a request whose load"
            " misses fails there, and is not recomputed",
            hint='start the engine with "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if engine.role == "prefill":
        return refusal(
            code="KVD-FORCE-ROLE",
            message=f"engine {engine.engine_id} only prefills: it has no loads that could miss",
            hint="give the decoding engine; `kvctl engines` lists all",
        )
    target = message.target
    live = [claim for claim in claims if claim.state in (ClaimState.WAITING, ClaimState.LOADING)]
    found: list[Claim] = []
    if isinstance(target, AllWaiting):
        found = [claim for claim in live if _late(message, claim) is None]
    elif isinstance(target, OneRequest):
        found = [claim for claim in live if _named(claim, target.request_id)]
        if len(found) != 1:
            return _not_one(target, engine, found, requests, finished)
        if late := _late(message, found[0]):
            return late
    return ForcePlan(
        order_id=message.asker.order_id,
        engine_id=engine.engine_id,
        target=target,
        when=message.when,
        policy=engine.policy,
        mode=engine.mode,
        groups=engine.groups,
        channel="blocks" if engine.keeps_prefix else "request",
        carried_out=message.carry_out,
        requests=tuple(planned(claim, engine) for claim in found),
    )


def planned(claim: Claim, engine: DecodingEngine) -> PlannedMiss:
    """What a miss means for a claim at most: pieces of a large load that come before it are kept too."""
    keeps = min(claim.computed, claim.tokens) if engine.keeps_prefix else 0
    return PlannedMiss(
        request_id=claim.request_id,
        prefiller=claim.prefill.engine_id,
        loading=not claim.waiting,
        tokens=claim.tokens,
        keeps=keeps,
        recomputes=claim.tokens - keeps,
    )


def _not_one(
    target: OneRequest,
    engine: DecodingEngine,
    found: Sequence[Claim],
    requests: Sequence[str],
    finished: Sequence[str],
) -> Refused:
    name = target.request_id
    here = next((request_id for request_id in requests if _same(request_id, name)), "")
    if found:
        what = f"{name!r} names {len(found)} requests: {', '.join(claim.request_id for claim in found)}"
        hint = "give one of them"
    elif here:
        what, hint = f"the load of request {here} is over", "order it before the load is complete"
    elif any(_same(request_id, name) for request_id in finished):
        what, hint = f"request {name!r} has finished", "order it while the request waits for its KV"
    else:
        what = f"engine {engine.engine_id} has no request {name!r} that waits for KV from elsewhere"
        hint = "`kvctl transfers` lists loads; --next 1 takes the next one, whatever it is called"
    return refusal(code="KVD-FORCE-UNKNOWN", message=what, hint=hint)


def _late(message: ForceMiss, claim: Claim) -> Refused | None:
    """Why an order comes too late for a load that is under way."""
    part = message.part
    if claim.waiting or (message.when != "before" and part.group is None and not part.layer):
        return None
    what = '"before" is over' if message.when == "before" else "a layer or group is chosen when it begins"
    return refusal(
        code="KVD-FORCE-LATE",
        message=f"the load of request {claim.request_id} is under way: {what}",
        hint="use --when flight, without --layer and --group",
    )


def _named(claim: Claim, name: str) -> bool:
    ids = (claim.request_id, claim.prefill.request_id, claim.transfer_id)
    return any(_same(request_id, name) for request_id in ids)


def _same(request_id: str, name: str) -> bool:
    return request_id.startswith(name) and (
        request_id == name or _ADDED.fullmatch(request_id, len(name)) is not None
    )
