"""Which of vLLM's own tests run against KvdConnector, what is adapted for them, what does not apply, and why.

`tests.upstream.plugin` does what stands here and nothing else, and docs/upstream-tests.md is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.daemons import ROOT

FETCHED = ROOT / ".builds" / "upstream"
"""Where `.ci/setup routers` puts these tests."""
UNITS = Path("tests", "v1", "kv_connector", "unit")
INTEGRATION = Path("tests", "v1", "kv_connector", "nixl_integration")
PREFILLS = UNITS / "test_remote_decode_lifecycle.py"
DECODES = UNITS / "test_remote_prefill_lifecycle.py"
SEVERAL = UNITS / "test_multi_connector.py"
BOTH_WAYS = UNITS / "test_bidirectional_kv_transfer.py"
FILES = (DECODES, PREFILLS, SEVERAL, BOTH_WAYS)


@dataclass(frozen=True, slots=True)
class Adaptation:
    """``what`` of the tests becomes ``now``; ``why``."""

    what: str
    now: str
    why: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """Tests that do not apply, by name without their parameters.

    ``instead`` is a test of ours that wants the like of KvdConnector, empty where there is nothing like it.
    """

    names: tuple[str, ...]
    why: str
    instead: str = ""


ADAPTATIONS = {
    "model": Adaptation(
        "`create_vllm_config`'s `facebook/opt-125m`",
        "a Llama of three layers, written on the spot",
        "nothing is downloaded; the scheduler reads its configuration only, and KvdConnector its weights' fingerprint",
    ),
    "connector": Adaptation(
        "`create_vllm_config`'s `NixlConnector`",
        "`KvdConnector` of `kvd.vllm`, with the folder of a kvd that runs",
        "it is what is tested",
    ),
    "role": Adaptation(
        "`create_vllm_config`'s `kv_consumer`",
        "`kv_both`",
        "the tests of prefillers have that role too. NixlConnector does not look at it; an engine of ours that is a"
        " consumer prefills for nobody",
    ),
    "worker": Adaptation(
        "`create_scheduler`, which has no worker",
        "a worker's card at kvd for each scheduler, before its first request",
        "kvd calls an engine complete when all of its workers are there, and a prefiller offers nothing before",
    ),
    "params": Adaptation(
        "`create_request`'s `kv_transfer_params`, which name a prefiller that is not there",
        "those that a prefiller gave for that prompt: a scheduler with KvdConnector at a second kvd",
        "KvdConnector takes params only under their prefiller's seal, with a lease that is open, for the same prompt",
    ),
    "answer": Adaptation(
        "`add_request`, and `schedule` right after it",
        "a wait in between, until both kvds have answered",
        "the connector says that it does not know yet until then, and the scheduler asks again in the next step; the"
        " tests count steps",
    ),
    "stats": Adaptation(
        "`NixlKVConnectorStats` and the names of its entries, in the tests of a MultiConnector's statistics",
        "`KvdTransferStats` and its names",
        "each connector has its own; what the tests want of them is the same",
    ),
    "child": Adaptation(
        "`MockHMAConnector` below a MultiConnector",
        "`KvdConnector`",
        "what the mock stands for: a connector that takes several groups and claims no deeper hit",
    ),
    "nixl's doubles": Adaptation(
        "`test_nixl_connector`, from which a file takes a worker of NixlConnector's",
        "a module with empty classes of these names",
        "only tests that do not apply use them, and it imports ray",
    ),
}
"""By the name under which the plugin carries each out."""

MISSES: dict[str, str] = {}
"""Codes of misses that tests of schedulers bring about, and why. Any other in a ledger fails the run."""
SERVED_MISSES = {
    "PROMPT_MISMATCH": "of a request with two prompts the proxy hands both the params of the first, so one is computed"
}
"""The same of tests of running servers."""

READS_BACK = (
    "a prefiller reads from a decoder what that kept for it of an earlier turn. Engines of ours keep nothing for that:"
    " `prefixes` reads what is in the cache, and `bidirectional_kv_xfer` is named as without effect"
)
UNFIT: dict[Path, tuple[Unfit, ...]] = {
    DECODES: (),
    PREFILLS: (),
    SEVERAL: (
        Unfit(
            ("test_multi_example_connector_consistency",),
            "an engine that computes writes KV to disk by two ExampleConnectors; no other connector is in it, and the"
            " model is a gated one of the hub",
        ),
        Unfit(
            ("test_multi_connector_mixed_hma_disables_hybrid_kv_cache",),
            "wants a GPU and a model of the hub; test_multi_connector_hma_support_detection, which runs, asks the like"
            " of KvdConnector without an engine",
        ),
    ),
    BOTH_WAYS: (
        Unfit(
            (
                "test_multiturn_lifecycle",
                "test_remote_blocks_exceed_prompt_tokens",
                "test_p_node_pulls_partial_last_block_from_d",
                "test_build_connector_meta_recv_entries",
                "test_build_connector_meta_clears_reqs_need_recv",
                "test_build_connector_meta_multiple_requests",
                "test_no_double_read_blocks_after_reschedule",
                "test_partial_remote_tokens_less_than_prompt",
                "test_remote_blocks_processed_flag_persists",
            ),
            f"the prefiller's scheduler: {READS_BACK}",
        ),
        Unfit(
            (
                "test_d_node_request_finished_returns_kv_params",
                "test_d_node_request_finished_delays_block_free",
                "test_d_node_request_finished_remote_num_tokens",
                "test_d_node_partial_last_block_remote_num_tokens",
                "test_remote_num_tokens_bounded_by_blocks",
                "test_d_node_request_finished_exports_blocks_expiry_time",
            ),
            f"the decoder's scheduler: {READS_BACK}",
        ),
        Unfit(
            (
                "test_p_node_pull_kv_from_d",
                "test_p_node_pull_then_send_kv",
                "test_p_node_deferred_pull_on_no_handshake",
            ),
            "methods and tables of NixlConnector's worker",
            "tests/kvd/worker/test_worker.py::test_a_peer_is_asked_for_when_it_is_not_known",
        ),
        Unfit(
            (
                "test_turn2_deadline_gate",
                "test_turn2_full_prefix_hit_with_expired_deadline_skips_gate",
            ),
            "methods and tables of NixlConnector's worker",
            "tests/kvd/worker/test_worker.py::test_a_lease_that_ran_out_before_the_load_began_is_a_miss",
        ),
        Unfit(
            ("test_add_new_req_to_recv_populates_remote_meta",),
            "a method of NixlConnector's own message from scheduler to workers",
            "tests/kvd/vllm/scheduler/test_half.py::test_the_order_names_the_blocks_of_what_is_missing",
        ),
        Unfit(
            ("test_handshake_listener_appends_perf_counter_frame",),
            "NixlConnector's handshake; kvds compare no clocks",
            "tests/kvd/vllm/scheduler/test_half.py::test_the_load_has_no_more_time_than_the_lease",
        ),
        Unfit(
            ("test_abort_p_side_non_length_capped",),
            "looks for the request in a table of NixlConnector's",
            "tests/kvd/vllm/scheduler/test_prefilling.py::test_an_aborted_prefill_and_an_ordinary_request_keep_nothing",
        ),
    ),
}

EDGES = INTEGRATION / "test_edge_cases.py"
ACCURACY = INTEGRATION / "test_accuracy.py"
STATES = INTEGRATION / "test_mamba_prefix_cache.py"
SERVED = {"llama": (EDGES, ACCURACY), "qwen3.5-gdn": (STATES,)}
"""Tests of running servers, by the tiny model that these serve."""
SERVED_ADAPTATIONS = {
    "servers": Adaptation(
        "two servers with NixlConnector and a model of the hub, each on a GPU",
        "two on CPUs with KvdConnector and a tiny model, a kvd beside each, prefix caching on; vLLM's own"
        " `toy_proxy_server.py` in front of them, unchanged",
        "it is what is tested, and nothing is downloaded",
    ),
    "port": Adaptation(
        "`test_accuracy`'s port 8192",
        "a free one",
        "somebody else may have it",
    ),
    "lm_eval": Adaptation(
        "`lm_eval` with the data set gsm8k, and what a model reaches in it",
        "100 prompts by way of the proxy, as many at once as the test says. The result is the share that is answered as"
        " by an engine without a connector that is asked as many at once. All are expected, but for the test's own"
        " margin of 5 %",
        "neither is here, and a tiny model with made-up weights solves nothing; equal answers say more than a score",
    ),
    "prompt": Adaptation(
        "`test_mamba_prefix_cache`'s prompt of 23,000 characters",
        "its first 6,000",
        "a token of a tiny model is one character, and it takes 8,192",
    ),
    "metrics": Adaptation(
        "`vllm:nixl_*` in a server's metrics",
        "`vllm:kvd_*`, by the rules of `configs/monitoring/nixl-names.yaml`",
        "with these rules Prometheus gives the one for the other",
    ),
}
"""As `ADAPTATIONS`, of `tests.upstream.served`."""
