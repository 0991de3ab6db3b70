"""What describe-topology says of models that need not run, with figures worked out by hand."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvctl.views.test_formats import check

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


@pytest.fixture
def planned(run: Run) -> Any:
    def describe(model: str, local: str, remote: str, *more: str) -> dict[str, Any]:
        arguments = ("--model", model, "--local", local, "--remote", remote, *more)
        outcome = run("describe-topology", *arguments, "-o", "json")
        assert outcome.code == 0, outcome.err
        document = json.loads(outcome.out)
        check(document)
        [pair] = document["pairs"]
        return dict(pair)

    return describe


def codes(pair: dict[str, Any]) -> dict[str, str]:
    return {finding["code"]: finding["severity"] for finding in pair["findings"]}


def test_llama_70b_from_8_ranks_to_4(planned: Any) -> None:
    """80 layers, 8 KV heads of 128, bfloat16.

    A block of 16 tokens of one head is 16 x 2 x 128 x 2 = 8,192 bytes. A rank of tp 4 has two heads, one of tp 8 has
    one: each local rank reads from two remote ones. In HND a head stands together: one copy; 8,192 tokens are 512
    blocks, so 512 x 80 x 8 copies in all.
    """
    pair = planned("llama-3.1-70b", "tp=4,layout=HND", "tp=8,layout=HND", "--tokens", "8192")
    assert [g["bytes_per_block"] for g in pair["groups"]] == [16_384]
    assert [(r["local_rank"], r["remote_rank"], r["heads"]) for r in pair["reads"]] == [
        (f"tp{head // 2}", f"tp{head}", [head, head + 1]) for head in range(8)
    ]
    assert {(r["bytes_per_block"], r["segments_per_block"]) for r in pair["reads"]} == {(8_192, 1)}
    request = pair["request"]
    assert (request["tokens"], request["bytes"]) == (8_192, 8_192 * 80 * 8 * 128 * 2 * 2)
    assert request["descriptors"] == request["coalesced_descriptors"] == 512 * 80 * 8
    assert request["bytes_by_rank"] == {f"tp{n}": 512 * 80 * 8_192 for n in range(8)}
    assert request["bytes_by_local_rank"] == {f"tp{n}": 2 * 512 * 80 * 8_192 for n in range(4)}
    assert sum(link["bytes"] for link in request["links"]) == request["bytes"]
    assert codes(pair) == {}


def test_the_same_in_nhd_is_16_times_the_copies(planned: Any) -> None:
    """Token by token one head's 2 x 128 x 2 = 512 bytes stand together: 16 copies where HND needs one."""
    pair = planned("llama-3.1-70b", "tp=4,layout=NHD", "tp=8,layout=NHD")
    assert {(r["bytes_per_block"], r["segments_per_block"]) for r in pair["reads"]} == {(8_192, 16)}
    assert pair["request"]["descriptors"] == 16 * 512 * 80 * 8
    [storm] = [f for f in pair["findings"] if f["code"] == "DESCRIPTOR_STORM"]
    assert "16 copies of 512 bytes on average, 16x the descriptors of HND" in storm["message"]
    assert "VLLM_KV_CACHE_LAYOUT=HND" in storm["hint"]


def test_deepseek_latents_are_read_once_by_every_rank(planned: Any) -> None:
    """61 layers of 512 + 64 values: a block of 16 is 16 x 576 x 2 = 18,432 bytes, whole on all 8 ranks."""
    pair = planned("deepseek-v3", "tp=8", "tp=8", "--tokens", "1600")
    assert pair["groups"][0]["bytes_per_block"] == 18_432
    assert pair["request"]["bytes"] == 8 * 100 * 61 * 18_432
    # Whole pages in a row on both sides: one run a layer and rank.
    assert (pair["request"]["descriptors"], pair["request"]["coalesced_descriptors"]) == (
        8 * 100 * 61,
        8 * 61,
    )
    assert codes(pair) == {"REPEATED_READS": "info", "LAYERS_APART": "info"}


def test_qwen3_next_states_are_split_and_its_heads_repeated(planned: Any) -> None:
    """2 KV heads over 4 and 8 ranks, and 32 value heads of a 128 x 128 state, over 36 layers in 3 groups."""
    pair = planned("qwen3-next-80b-a3b", "tp=4", "tp=8")
    kinds = [(g["kind"], len(g["layers"])) for g in pair["groups"]]
    assert sorted(kinds) == [("full", 12), ("mamba", 12), ("mamba", 12), ("mamba", 12)]
    state = next(g["bytes_per_block"] for g in pair["groups"] if g["kind"] == "mamba")
    # tp 4: conv of 3 taps x (2 x 4 + 8) heads x 128 channels, and 8 heads x 128 x 128; both bfloat16.
    assert state == 2 * (3 * (2 * 4 + 8) * 128 + 8 * 128 * 128)
    full = next(g["index"] for g in pair["groups"] if g["kind"] == "full")
    heads = {tuple(r["heads"]) for r in pair["reads"] if r["group"] == full}
    assert heads == {(0, 1), (1, 2)}
    assert len(set(pair["request"]["bytes_by_rank"].values())) == 1
    assert codes(pair) == {"BLOCK_GEOMETRY": "info", "REPEATED_READS": "info"}


@pytest.mark.parametrize(
    ("text", "rate"), [("50GB/s", 50e9), ("400Gbit/s", 50e9), ("46GiB/s", 46 * 2**30), ("1e9", 1e9)]
)
def test_a_bandwidth_gives_the_time_of_the_busiest_rank(planned: Any, text: str, rate: float) -> None:
    request = planned("llama-3.1-8b", "tp=2", "tp=4", "--tokens", "16000", "--bandwidth", text)["request"]
    # A local rank takes 4 of 8 heads of 32 layers.
    assert request["bandwidth"] == rate
    assert request["seconds"] == pytest.approx(16_000 * 32 * 4 * 128 * 2 * 2 / rate)


def test_without_a_bandwidth_there_is_no_time(planned: Any) -> None:
    request = planned("llama-3.1-8b", "tp=2", "tp=4")["request"]
    assert (request["tokens"], request["bandwidth"], request["seconds"]) == (8192, None, None)


def test_block_sizes_that_differ_are_told(planned: Any) -> None:
    pair = planned("llama-3.1-8b", "tp=2,block_size=64", "tp=2")
    assert codes(pair)["BLOCK_GEOMETRY"] == "info"


def test_a_state_has_no_tokens(planned: Any) -> None:
    pair = planned("qwen3-next-80b-a3b", "tp=4", "tp=8")
    assert [g["block_size"] for g in pair["groups"]] == [0, 0, 0, 272]
    assert pair["remote"]["block_sizes"] == [0, 0, 0, 144]
    [sizes] = [f for f in pair["factors"] if f["name"] == "block sizes"]
    assert (sizes["local"], sizes["remote"]) == ("state, state, state, 272", "state, state, state, 144")


def test_layouts_that_differ_are_told(planned: Any) -> None:
    pair = planned("llama-3.1-8b", "tp=2,layout=HND", "tp=2,layout=NHD")
    assert {"LAYOUT_MISMATCH": "info", "DESCRIPTOR_STORM": "warning"}.items() <= codes(pair).items()


def test_stages_of_unlike_depth_carry_unlike_loads(planned: Any) -> None:
    """Of 32 layers 24 and 8: the first stage sends 1.5 times the average."""
    pair = planned("llama-3.1-8b", "tp=1", "tp=1,pp=2,partition=24+8")
    [uneven] = [f for f in pair["findings"] if f["code"] == "UNEVEN_LOAD"]
    assert "remote rank tp0 sends 1.5 times the average of its 2 ranks" in uneven["message"]


def test_a_pair_that_does_not_fit_has_no_request(run: Run) -> None:
    outcome = run("describe-topology", "qwen3-32b:tp=4", "llama-3.1-8b:tp=4", "-o", "json")
    document = json.loads(outcome.out)
    check(document)
    [pair] = document["pairs"]
    assert (outcome.code, pair["request"], pair["compatible"]) == (1, None, False)
    assert {f["severity"] for f in pair["findings"]} == {"error"}


def test_the_table_shows_what_a_request_costs_and_the_load_of_every_rank(run: Run) -> None:
    arguments = ("llama-3.1-70b:tp=4,layout=HND", "llama-3.1-70b:tp=8,layout=HND", "--bandwidth", "50GB/s")
    lines = run("describe-topology", *arguments).out.splitlines()
    assert "tp3    .        .        .        .        .        .        50%      50%      640 MiB" in lines
    sends = [line for line in lines if line.startswith("sends")]
    assert sends == ["sends  " + "320 MiB  " * 8 + "2.50 GiB"]
    [request] = [line for line in lines if line.startswith("8192 tokens")]
    assert request.split() == [
        *("8192", "tokens", "2.50", "GiB", "327680", "327680", "8.00", "KiB", "640", "MiB"),
        *("13.4", "ms", "at", "46.6", "GiB/s", "a", "rank"),
    ]


@pytest.mark.parametrize(("local", "remote"), [(256, 256), (1000, 504)])
def test_large_engines_are_described_in_under_three_seconds_of_a_core(
    run: Run, local: int, remote: int
) -> None:
    """And on a screen that a person can read: ranks that are alike are one row."""
    began = time.process_time()
    outcome = run(
        "describe-topology", "--model", "qwen3-32b", "--local", f"tp={local}", "--remote", f"tp={remote}"
    )
    assert time.process_time() - began < 3.0
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.out.splitlines()) < 60
