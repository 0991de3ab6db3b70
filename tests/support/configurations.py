"""The configurations of docs/matrix.md: what people run vLLM with, and what came of it where it is not `works`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvctl.cli.units import Mode
from tests.support.deployments import HYBRID_BLOCK
from tests.support.pictures import PICTURE_TOKENS

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
        by_hand: whether no engines run, as vLLM's CPU build lacks it without a word.
        lacks: what vLLM's CPU build says instead of running it. Then its scheduler is stepped by hand.
        stepped: vLLM's parallel arguments of a prefiller whose scheduler is stepped by hand.
        both, prefill, decode: vLLM's own arguments of both engines or of one.
        draft: a tiny model whose folder becomes the ``model`` of a ``speculative_config``.
        roles: ``kv_role`` of the two engines.
        beside: a connector that stands behind the column's own in a MultiConnector, on both engines.
        lease: seconds for which a prefiller keeps blocks that nobody reads.
        request: what goes with each request besides its prompt; `tests.support.asked.Request` has the names.
        ranks: data-parallel ranks of the two engines.
        ranks_named: whether a request names the ranks that are to answer; else vLLM balances.
        at_once: requests on their way at the same time.
        lengths: tokens of the prompts that are asked.
        continued: whether each prompt goes on where the one before ended, which both engines still have cached.
        step: most tokens in a step of either engine.
        token_bytes: what moves of a token, a drafter's part too, with blocks of 128; not looked at where it is 0.
        more_tokens: what a picture adds to a prompt, beside the token in its place that `tests.support.asked` adds.
        workers: workers of an engine that decodes; each writes a record of its part.
        found: what came of it, by column, where that is not `WORKS`.
    """

    name: str
    model: str = "llama"
    by_hand: bool = False
    lacks: str = ""
    stepped: Mapping[str, Any] | None = None
    both: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    draft: str = ""
    roles: tuple[str, str] = ("kv_producer", "kv_consumer")
    beside: str = ""
    lease: int = 500
    request: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, int] = (1, 1)
    ranks_named: bool = True
    at_once: int = 1
    lengths: tuple[int, ...] = (100, 700)
    continued: bool = False
    step: int = 256
    token_bytes: int = 0
    more_tokens: int = 0
    workers: int = 1
    found: Mapping[str, str] = field(default_factory=dict)

    def expected(self, column: str) -> str:
        """What came of it in that column."""
        return self.found.get(column, BY_HAND if self.by_hand or self.lacks else WORKS)

    def __str__(self) -> str:
        return self.name.replace(" ", "_").replace(",", "")


@dataclass(frozen=True)
class Setup:
    """A row with what moves its KV: one pair of engines. Setups of several ``column`` are equal, and share it."""

    configuration: Configuration
    connector: Connector
    column: str = field(default="", compare=False)


def _drafts(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}}


def _lacks(words: str) -> dict[str, str]:
    """What vLLM's CPU build says, whichever connector it is given."""
    return dict.fromkeys(COLUMNS, f"not run: vLLM says `{words}`")


def _says(came: str, words: str, *columns: str) -> dict[str, str]:
    """What came of a configuration in these columns, with what an engine's log says of it."""
    return dict.fromkeys(columns, f"{came}: `{words}`")


def _blocks(tokens: int) -> dict[str, Any]:
    return {"block_size": tokens}


_TP2 = {"tensor_parallel_size": 2}
_EP2 = {**_TP2, "enable_expert_parallel": True}
_DP2_EP = {"data_parallel_size": 2, "enable_expert_parallel": True}
_TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""On CPUs a stage has room for what comes from the one before only once it has warmed up, as a compiled one does."""
_PP2 = {"pipeline_parallel_size": 2, **_TRACED}
_DCP2 = {**_TP2, "decode_context_parallel_size": 2}
_PCP2 = {"prefill_context_parallel_size": 2}
_LAYERS = "Number of KV layers must match between prefill and decode"
_UNDIVIDED = "Local block size 32 is not divisible by remote block size 128 or vice versa"
_PREFIXES: Any = {"continued": True, "lengths": (700, 1000, 1300)}
_STATES: Any = {"continued": True, "lengths": (900, 1500), "step": HYBRID_BLOCK, "both": {"max_num_seqs": 1}}
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
    Configuration(
        name="a draft model on the decoder alone",
        decode=DRAFT,
        draft="llama",
        lease=30,  # the pair is refused, and the second prompt waits until the blocks of the first are free
        found=_says("computed again", "layer names is 6 here and 3 there", "pull", "push")
        | _says("computed again", _LAYERS, "stock pull", "stock push"),
    ),
    Configuration(name="EAGLE", both=_drafts("eagle"), draft="eagle", token_bytes=4 * LAYER),
    Configuration(
        name="MTP",
        model="predicting",
        both=_drafts("mtp", num_speculative_tokens=1),
        token_bytes=4 * LAYER // 2,
    ),
    Configuration(name="LoRA", both={"enable_lora": True, "max_lora_rank": 8}, request={"adapter": 1}),
    Configuration(
        name="a picture in the prompt",
        model="llava",
        request={"picture": 7},
        more_tokens=PICTURE_TOKENS,
    ),
    Configuration(name="structured output", request={"regex": "[a-d]{20}"}),
    Configuration(
        name="blocks of 32 to 128",
        prefill=_blocks(32),
        decode=_blocks(128),
        found={"stock pull": "wrong answer", "stock push": "no answer"},
    ),
    Configuration(
        name="blocks of 128 to 32",
        prefill=_blocks(128),
        decode=_blocks(32),
        found=dict.fromkeys(("stock pull", "stock push"), "computed again"),
    ),
    Configuration(name="fp8 KV", both=FP8),
    Configuration(
        name="fp8 KV, blocks of 32 to 128",
        both=FP8,
        prefill=_blocks(32),
        decode=_blocks(128),
        found={"stock pull": "wrong answer", **_says("no answer", _UNDIVIDED, "stock push")},
    ),
    Configuration(name="PP 2 to 1", prefill=_PP2, found=_says("computed again", _LAYERS, "stock pull")),
    Configuration(
        name="PP 1 to 2",
        decode=_PP2,
        workers=2,
        found=_says(
            "does not start",
            "NixlPushConnector consumer (decode) does not support pipeline_parallel_size > 1",
            "stock pull",
            "stock push",
        ),
    ),
    Configuration(name="DP 2 to 1", prefill={"data_parallel_size": 2}, ranks=(2, 1)),
    Configuration(name="DP 1 to 2", decode={"data_parallel_size": 2}, ranks=(1, 2)),
    Configuration(
        name="DP 1 to 2, no rank named", decode={"data_parallel_size": 2}, ranks=(1, 2), ranks_named=False
    ),
    Configuration(
        name="DP 2 to 1, external balancing",
        prefill={"data_parallel_size": 2, "data_parallel_rank": 0},
        found=_lacks("Non-MoE models do not support external data parallel mode"),
    ),
    Configuration(name="TP 2 on two hosts to 1", prefill={**_TP2, "nnodes": 2}),
    Configuration(
        name="PP 2 on two hosts to 1",
        prefill={**_PP2, "nnodes": 2},
        found=_says("computed again", _LAYERS, "stock pull"),
    ),
    Configuration(name="eight requests at once", at_once=8),
    Configuration(name="TP 1 to 2, prefixes cached", decode=_TP2, workers=2, **_PREFIXES),
    Configuration(name="TP 2 to 1, prefixes cached", prefill=_TP2, **_PREFIXES),
    Configuration(name="GDN, prefixes cached", model="qwen3.5-gdn", **_STATES),
    Configuration(
        name="GDN, TP 1 to 2, prefixes cached", model="qwen3.5-gdn", decode=_TP2, workers=2, **_STATES
    ),
    Configuration(name="GDN, TP 2 to 1, prefixes cached", model="qwen3.5-gdn", prefill=_TP2, **_STATES),
    Configuration(
        name="experts, EP 2 to 1", model="experts", prefill=_EP2, stepped=_EP2, lacks="cpu_fused_moe.cpp"
    ),
    Configuration(
        name="experts, DP 2 and EP to 1",
        model="experts",
        prefill=_DP2_EP,
        ranks=(2, 1),
        stepped={**_DP2_EP, "data_parallel_rank": 1},
        lacks="NotImplementedError",
    ),
    Configuration(
        name="experts, DP 2 to 1, external balancing",
        model="experts",
        by_hand=True,
        stepped={**_DP2_EP, "data_parallel_rank": 1, "data_parallel_external_lb": True},
    ),
    Configuration(
        name="experts, DP 2 to 1, hybrid balancing",
        model="experts",
        by_hand=True,
        stepped={
            **_DP2_EP,
            "data_parallel_rank": 1,
            "data_parallel_hybrid_lb": True,
            "data_parallel_size_local": 1,
        },
    ),
    Configuration(
        name="DCP 2 to 1, latents",
        model="deepseek-v2",
        prefill=_DCP2,
        stepped=_DCP2,
        lacks="return the softmax LSE during decode, but CPUMLAImpl does not",
        found=_says(
            "does not start",
            "NixlPushConnector does not support decode_context_parallel_size > 1",
            "stock push",
        ),
    ),
    Configuration(
        name="PCP 2 to 1, latents",
        model="deepseek-v2",
        prefill=_PCP2,
        stepped=_PCP2,
        lacks="Model Runner V1 does not support: prefill context parallel",
    ),
    Configuration(
        name="sleep mode",
        both={"enable_sleep_mode": True},
        found=_lacks("Sleep mode is not supported on current platform"),
    ),
    ASYNCHRONOUS,
    OFFLOADING_BEHIND,
    # It cannot load into a prompt that takes several steps, with any connector beside it.
    Configuration(name="MultiConnector, ExampleConnector behind", beside="ExampleConnector", step=2048),
)
