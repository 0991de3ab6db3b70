"""The configurations of docs/matrix.md: what people run vLLM with, and what came of it where it is not `works`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvctl.cli.units import Mode

Connector = Literal["KvdConnector", "NixlConnector", "NixlPushConnector"]
COLUMNS: dict[str, tuple[Connector, Mode]] = {
    "pull": ("KvdConnector", "pull"),
    "push": ("KvdConnector", "push"),
    "stock pull": ("NixlConnector", "pull"),
    "stock push": ("NixlPushConnector", "push"),
}
"""The table's columns: who moves the KV, and how. One pair of engines with KvdConnector does both."""
WORKS = "works"
BY_HAND = "works, by hand"
LAYER = 1024
"""Bytes of a token in a layer of the tiny Llama; one of `predicting` has half as many heads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Configuration:
    """A row of the table.

    Attributes:
        name: as the page calls it.
        model: of `tests.support.tiny_models` or `tests.support.odd_models`.
        by_hand: whether vLLM's CPU build lacks it, so that no engines run.
        both, prefill, decode: vLLM's own arguments of both engines or of one.
        draft: a tiny model whose folder becomes the ``model`` of a ``speculative_config``.
        roles: ``kv_role`` of the two engines.
        beside: a connector that stands behind ours in a MultiConnector, on both engines.
        request: what goes with each request besides its prompt; `tests.support.asked.Request` has the names.
        ranks: data-parallel ranks of the two engines.
        token_bytes: what moves of a token, a drafter's part too, with blocks of 128; not looked at where it is 0.
        workers: workers of an engine that decodes; each writes a record of its part.
        found: what came of it, by column, where that is not `WORKS`.
    """

    name: str
    model: str = "llama"
    by_hand: bool = False
    both: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    draft: str = ""
    roles: tuple[str, str] = ("kv_producer", "kv_consumer")
    beside: Mapping[str, Any] | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, int] = (1, 1)
    token_bytes: int = 0
    workers: int = 1
    found: Mapping[str, str] = field(default_factory=dict)

    def expected(self, column: str) -> str:
        """What came of it in that column."""
        return self.found.get(column, WORKS)

    def __str__(self) -> str:
        return self.name.replace(" ", "_").replace(",", "")


@dataclass(frozen=True)
class Setup:
    """A row with what moves its KV: one pair of engines."""

    configuration: Configuration
    connector: Connector


def _drafts(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}}


def _lacks(words: str) -> dict[str, str]:
    """What vLLM's CPU build says, whichever connector it is given."""
    return dict.fromkeys(COLUMNS, f"not run: vLLM says `{words}`")


def _blocks(tokens: int) -> dict[str, Any]:
    return {"block_size": tokens}


_TP2 = {"tensor_parallel_size": 2}
_DP2_EP = {"data_parallel_size": 2, "enable_expert_parallel": True}
_TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""On CPUs a stage has room for what comes from the one before only once it has warmed up, as a compiled one does."""
_PP2 = {"pipeline_parallel_size": 2, **_TRACED}
_DCP2 = {**_TP2, "decode_context_parallel_size": 2}
_PCP2 = {"prefill_context_parallel_size": 2}
FP8 = {"kv_cache_dtype": "fp8"}
NGRAM = _drafts("ngram", prompt_lookup_max=3, prompt_lookup_min=1)
DRAFT = _drafts("draft_model")

ASYNCHRONOUS = Configuration(name="asynchronous scheduling", by_hand=True)
OFFLOADING_BEHIND = Configuration(name="MultiConnector, OffloadingConnector behind", by_hand=True)
CONFIGURATIONS = (
    Configuration(name="vLLM's defaults"),
    Configuration(name="kv_both on both sides", roles=("kv_both", "kv_both")),
    Configuration(name="chunks of 64 tokens", both={"max_num_batched_tokens": 64, "max_num_seqs": 8}),
    Configuration(name="ngram speculation", both=NGRAM),
    Configuration(name="a draft model", both=DRAFT, draft="llama", token_bytes=6 * LAYER),
    Configuration(name="a draft model on the decoder alone", decode=DRAFT, draft="llama"),
    Configuration(name="EAGLE", both=_drafts("eagle"), draft="eagle", token_bytes=4 * LAYER),
    Configuration(
        name="MTP",
        model="predicting",
        both=_drafts("mtp", num_speculative_tokens=1),
        token_bytes=4 * LAYER // 2,
    ),
    Configuration(name="LoRA", both={"enable_lora": True, "max_lora_rank": 8}, request={"adapter": 1}),
    Configuration(name="structured output", request={"regex": "[a-d]{20}"}),
    Configuration(name="blocks of 32 to 128", prefill=_blocks(32), decode=_blocks(128)),
    Configuration(name="blocks of 128 to 32", prefill=_blocks(128), decode=_blocks(32)),
    Configuration(name="fp8 KV", both=FP8),
    Configuration(name="fp8 KV, blocks of 32 to 128", both=FP8, prefill=_blocks(32), decode=_blocks(128)),
    Configuration(name="PP 2 to 1", prefill=_PP2),
    Configuration(name="PP 1 to 2", decode=_PP2, workers=2),
    Configuration(name="DP 2 to 1", prefill={"data_parallel_size": 2}, ranks=(2, 1)),
    Configuration(name="DP 1 to 2", decode={"data_parallel_size": 2}, ranks=(1, 2)),
    Configuration(
        name="experts, EP 2 to 1", model="experts", prefill={**_TP2, "enable_expert_parallel": True}
    ),
    Configuration(
        name="experts, DP 2 and EP to 1",
        model="experts",
        prefill=_DP2_EP,
        ranks=(2, 1),
        found=_lacks("NotImplementedError"),
    ),
    Configuration(name="DCP 2 to 1, latents", model="deepseek-v2", prefill=_DCP2),
    Configuration(
        name="PCP 2 to 1, latents",
        model="deepseek-v2",
        prefill=_PCP2,
        found=_lacks("Model Runner V1 does not support: prefill context parallel"),
    ),
    Configuration(
        name="sleep mode",
        both={"enable_sleep_mode": True},
        found=_lacks("Sleep mode is not supported on current platform"),
    ),
    ASYNCHRONOUS,
    OFFLOADING_BEHIND,
)
