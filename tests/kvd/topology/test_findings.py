"""What an operator is told of a pair, and in which words; each case is one that field notes tell of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.geometry.config import CacheOptions, Parallel
from kvd.geometry.model import EngineGeometry
from kvd.installed import UNINSTALLED
from kvd.topology.compat import compare
from kvd.topology.cost import RequestCost
from kvd.topology.describe import PairDescription, describe
from kvd.topology.findings import Finding, find
from tests.support.samples import engine, engine_from_config, gated_delta_net, latent, llama

TWO = ("layers.0", "layers.1")


def llama_8b(layout: str, tp: int = 1) -> EngineGeometry:
    """32 layers of 8 heads: a page of 16 tokens is 64 KiB."""
    document = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    return engine_from_config(document, Parallel(tp=tp), CacheOptions(layout=layout), engine_id=layout)


def found(pair: PairDescription, code: str) -> list[Finding]:
    return [finding for finding in pair.findings if finding.code == code]


def test_token_major_pages_cost_as_many_copies_as_a_block_has_tokens() -> None:
    shape = llama(TWO, layout="NHD", block=64)
    pair = describe(
        engine("d", ("full", 64, None, shape), tp=4), engine("p", ("full", 64, None, shape), tp=8)
    )
    [storm] = found(pair, "DESCRIPTOR_STORM")
    assert "64 copies of 512 bytes on average, 64x the descriptors of HND" in storm.message


def test_unequal_blocks_are_told_with_both_sizes() -> None:
    pair = describe(
        engine("d", ("full", 16, None, llama(TWO))), engine("p", ("full", 64, None, llama(TWO, block=64)))
    )
    [blocks] = found(pair, "BLOCK_GEOMETRY")
    assert blocks.severity == "info"
    assert "blocks of 16 tokens here and of 64 there" in blocks.message


def test_a_reader_that_fails_requests_whose_load_misses_is_told() -> None:
    local = engine("d", ("full", 16, None, llama(TWO)))
    there = engine("p", ("full", 16, None, llama(TWO)))
    failing = replace(local, facts={**local.facts, "load_failure_policy": "fail"})
    [told] = found(describe(failing, there), "LOAD_FAILURE_FAIL")
    assert (told.severity, "recompute" in told.hint) == ("warning", True)
    assert found(describe(local, there), "LOAD_FAILURE_FAIL") == []


def test_states_have_no_blocks_to_compare() -> None:
    shape = gated_delta_net(TWO)
    pair = describe(engine("d", ("mamba", 640, None, shape)), engine("p", ("mamba", 128, None, shape)))
    assert found(pair, "BLOCK_GEOMETRY") == []


def test_another_layout_is_told_though_the_plan_handles_it() -> None:
    local = engine("d", ("full", 16, None, llama(TWO)), layout="HND")
    remote = engine("p", ("full", 16, None, llama(TWO, layout="NHD")), layout="NHD")
    [layout] = found(describe(local, remote), "LAYOUT_MISMATCH")
    assert "HND here and NHD there" in layout.message


def test_more_ranks_than_heads_read_the_same_bytes_again() -> None:
    local = engine("d", ("full", 16, None, llama(TWO, heads=2)), tp=8)
    [again] = found(describe(local, engine("p", ("full", 16, None, llama(TWO, heads=2)))), "REPEATED_READS")
    assert "4 local ranks hold the same heads, so their bytes are moved 4 times" in again.message
    local = engine("d", ("mla", 64, None, latent(TWO)), tp=8)
    [again] = found(describe(local, engine("p", ("mla", 64, None, latent(TWO)))), "REPEATED_READS")
    assert "8 local ranks hold the same latents" in again.message


def test_layers_that_stand_apart_are_told_where_nothing_else_keeps_a_block_from_being_one_copy() -> None:
    apart, together = llama_8b("LBHNC"), llama_8b("BLHNC")
    [layers] = found(describe(apart, apart), "LAYERS_APART")
    assert "32 copies of 65536 bytes" in layers.message
    assert (layers.severity, "outermost" in layers.hint) == ("info", True)
    assert found(describe(together, together), "LAYERS_APART") == []
    # The heads of a part of them are no run across layers either way.
    assert found(describe(apart, llama_8b("LBHNC", tp=2)), "LAYERS_APART") == []


def test_layers_may_stand_apart_for_pushes_and_on_cpus() -> None:
    apart = llama_8b("LBHNC")
    pushing = replace(apart, facts={**apart.facts, "transfer_mode": "push"})
    live = replace(apart, facts={**apart.facts, "connector_version": "1"})
    assert found(describe(pushing, pushing), "LAYERS_APART") == []
    assert found(describe(live, live), "LAYERS_APART") == []


@pytest.mark.parametrize(("there", "skews"), [("2", 1), ("unknown", 0), (UNINSTALLED, 0)])
def test_versions_differ_only_where_both_are_known(there: str, skews: int) -> None:
    base = llama_8b("LBHNC")
    pair = [replace(base, facts={**base.facts, "connector_version": version}) for version in ("1", there)]
    assert len(found(describe(*pair), "VERSION_SKEW")) == skews


def test_a_rank_that_carries_more_than_its_share_is_named() -> None:
    local = engine("d", ("full", 16, None, llama(TWO)))
    cost = RequestCost(64, 400, 4, 4, {"tp0": 300, "tp1": 100}, {"tp0": 400}, {})
    [uneven] = find(local, local, compare(local, local), (), cost)
    assert (uneven.code, uneven.severity) == ("UNEVEN_LOAD", "warning")
    assert "remote rank tp0 sends 1.5 times the average of its 2 ranks" in uneven.message


def test_equal_engines_give_no_reason_to_speak() -> None:
    one = engine("d", ("full", 16, None, llama(TWO)), tp=2, layout="HND")
    assert describe(one, one, tokens=100).findings == ()


def test_many_small_copies_are_told_where_no_page_is_to_blame() -> None:
    one = engine("d", ("full", 16, None, llama(TWO)))
    cost = RequestCost(8192, 200_000 * 1000, 200_000, 200_000, {"tp0": 1}, {"tp0": 1}, {})
    [many] = find(one, one, compare(one, one), (), cost)
    assert (many.code, many.severity) == ("MANY_SMALL_COPIES", "warning")
    assert "200000 copies of 1000 bytes" in many.message


def test_a_plan_that_fails_for_a_reason_that_is_told_already_is_not_told_again() -> None:
    local = engine("d", ("full", 16, None, llama(TWO)), kv_heads=8)
    remote = engine("p", ("full", 16, None, llama(TWO, heads=4)), kv_heads=4)
    assert [f.code for f in describe(local, remote).findings] == ["COMPAT_MISMATCH"]
    local = engine("d", ("full", 16, None, llama(TWO)))
    assert [
        f.code for f in describe(local, engine("p", ("full", 16, None, llama(TWO, heads=4)))).findings
    ] == ["TP_UNSUPPORTED"]


def test_what_holds_for_several_groups_is_told_once() -> None:
    def both(size: int) -> tuple[object, ...]:
        shape = [llama((name,), block=size) for name in TWO]
        return ("full", size, None, shape[0]), ("sliding_window", size, 4096, shape[1])

    pair = describe(engine("d", *both(16)), engine("p", *both(64)))  # type: ignore[arg-type]
    [blocks] = found(pair, "BLOCK_GEOMETRY")
    assert blocks.message.startswith("groups 0, 1: blocks of 16 tokens here and of 64 there")
