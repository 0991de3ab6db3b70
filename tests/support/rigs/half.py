"""One engine's scheduler half, and what vLLM hands to it, without a kvd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvd.vllm.memory.groups import GroupFacts
from kvd.vllm.params import finished_prefill
from kvd.vllm.scheduler.half import SchedulerHalf
from kvd.vllm.vllm_types import LOOKAHEAD
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineCard, EngineFacts
from kvd.wire.lease import LeaseClaim, LeaseClaimed
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import GENERATION, KEY, Script, facts, prefill

LLAMA = (GroupFacts("full", 4),)
HYBRID = (GroupFacts("mamba", 8), GroupFacts("full", 8))
PREFILL_HERE = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Request:
    """vLLM's request, as far as it is looked at."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(10)))
    num_prompt_tokens: int = 10
    num_computed_tokens: int = 0
    max_tokens: int = 16
    _all_token_ids: list[int] = field(default_factory=lambda: list(range(10)))
    sampling_params: Any = None
    trace_headers: Any = None


PEER = PeerReady(
    local_engine="d",
    peer=EngineCard(engine=facts("p"), generation=GENERATION, workers=(), digest_key=KEY),
)


def ahead(engine: EngineFacts, tokens: int) -> EngineFacts:
    """An engine whose drafter reads so many tokens further ahead."""
    return replace(engine, facts={**engine.facts, LOOKAHEAD: tokens}) if tokens else engine


class Engine:
    """One engine's scheduler half, which was told of its peer ahead unless ``known`` says otherwise."""

    def __init__(
        self,
        name: str,
        groups: Sequence[GroupFacts] = LLAMA,
        policy: str = "recompute",
        *,
        known: bool = True,
        lookahead: int = 0,
        **settings: Any,
    ) -> None:
        self.script = Script()
        self.half = SchedulerHalf(
            ConnectorSettings(**settings),
            ahead(facts(name, len(groups)), lookahead),
            groups,
            policy,
            self.script.open,
        )
        if known:
            self.script.push(PEER)

    def arrive(self, params: dict[str, Any] | None, request_id: str = "r", headers: Any = None) -> Request:
        request = Request(request_id, params, trace_headers=headers)
        self.half.new_request(request)
        return request

    def answer(self, lease_seconds: float = 20.0, peer: PeerReady = PEER) -> None:
        """kvd says yes to whatever was asked; ``peer`` is the prefiller."""
        for asked in self.script.asked(GetPeer):
            if not asked.future.done():
                asked.answer(peer)
        for asked in self.script.asked(LeaseClaim):
            if not asked.future.done():
                claim = asked.message
                asked.answer(
                    LeaseClaimed(
                        request_id=claim.key.request_id, seconds=lease_seconds, generation=claim.generation
                    )
                )


def from_prefiller(tokens: int = 10, blocks: tuple[tuple[int, ...], ...] = ((5, 6, 7),)) -> dict[str, Any]:
    return finished_prefill(prefill(blocks, tokens=tokens), tp=1, pp=1, dcp=1)


@dataclass
class Step:
    """vLLM's SchedulerOutput, as far as it is looked at."""

    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: frozenset[str] = frozenset()
    kv_connector_block_state: Any = None
