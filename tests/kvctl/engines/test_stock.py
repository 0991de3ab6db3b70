"""Engines behind stock connectors: what is asked, what is believed, what stays unknown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvctl.engines.stock import stock_address, stock_engine
from kvctl.errors import KvctlError, UsageError
from kvd.geometry.model import EngineGeometry
from tests.kvctl.stock.test_mooncake_bootstrap import answering, engine
from tests.support.stock_listeners import nixl_listener, saying, stock_factors, stock_metadata, stock_payload

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


def payload(tp: int = 4, factors: dict[str, Any] | None = None, **told: Any) -> bytes:
    return stock_payload(stock_metadata(tp, **told), stock_factors(**(factors or {})))


def described(port: int, options: str = "", scheme: str = "nixl") -> EngineGeometry:
    address = stock_address(f"{scheme}://127.0.0.1:{port}{options and ':' + options}")
    assert address is not None
    return stock_engine(address, 2)


def test_what_the_handshake_does_not_tell_is_unknown() -> None:
    with nixl_listener({(0, 0): payload()}) as listener:
        found = described(listener.port)
        assert listener.asked == [(0, 0)]
    assert (found.engine_id, found.model, found.tp, found.pp, found.dcp) == ("prefill", "", 0, 0, 1)
    assert found.workers == ()
    assert found.facts["block_size"] == 16
    assert found.facts["bytes_per_block"] == 64 * 16 * 2 * 128 * 2 * 2
    assert {"dtype", "cache_dtype", "kv_heads", "vllm_version"}.isdisjoint(found.facts)


def test_with_the_model_its_pages_are_known_and_the_size_follows() -> None:
    with nixl_listener({(0, 0): payload()}) as listener:
        found = described(listener.port, "model=qwen3-32b")
        assert listener.asked == [(0, 0)], "without proof of further ranks none may be asked for"
    assert (found.tp, len(found.workers), found.engine_id) == (4, 4, "prefill")
    assert "dtype" not in found.facts, "the model's own type is not what the engine was started with"


@pytest.mark.parametrize(("ranks", "options", "tp"), [(4, "", 4), (2, ",pp=2", 2), (8, ",tp=16", 16)])
def test_rank_0_alone_is_asked_whatever_the_hash_and_the_options_say(
    ranks: int, options: str, tp: int
) -> None:
    """Two pipeline stages of half the layers have blocks as long as one of all; a typed size may be too large."""
    with nixl_listener({(0, rank): payload(tp) for rank in range(ranks)}) as listener:
        found = described(listener.port, f"model=qwen3-32b,name=Qwen/Qwen3-32B{options}")
        assert (listener.asked, listener.alive) == ([(0, 0)], True)
    assert (found.facts["dtype"], found.facts["vllm_version"]) == ("bfloat16", "0.32.0")


def test_what_fits_several_sizes_is_to_be_typed() -> None:
    with (
        nixl_listener({(0, 0): payload(16)}) as listener,
        pytest.raises(UsageError, match=r"go with 8, 16, 24, 32, 64"),
    ):
        described(listener.port, "model=qwen3-32b")


def test_a_size_that_the_lengths_rule_out_is_refused_before_any_rank_is_asked_for() -> None:
    with nixl_listener({(0, 0): payload()}) as listener:
        with pytest.raises(KvctlError, match=r"tells 1048576 bytes .* would have 524288 \(tp=8\)") as caught:
            described(listener.port, "model=qwen3-32b,tp=8,name=Qwen/Qwen3-32B")
        assert (caught.value.code, listener.asked) == ("KVD-STOCK-MODEL", [(0, 0)])


def test_mooncake_tells_sizes_and_no_pages() -> None:
    with saying(answering({"0": engine(4, 2)})) as port:
        bare, known = described(port, scheme="mooncake"), described(port, "model=qwen3-32b", "mooncake")
    assert (bare.tp, bare.pp, bare.workers) == (4, 2, ())
    assert (known.tp, known.pp, len(known.workers)) == (4, 2, 8)
    assert "layout" not in known.facts


def test_a_rank_that_never_registered_is_named() -> None:
    told = engine(8)
    del told["worker_addr"]["3"]
    with (
        saying(answering({"0": told})) as port,
        pytest.raises(KvctlError, match=r"7 of 8 workers .* not tp3") as caught,
    ):
        described(port, scheme="mooncake")
    assert "RANK_NOT_REGISTERED" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "nixl://",
        "nixl://host",
        "nixl://host:0",
        "nixl://host:70000",
        "nixle://host:5600",
        "nixl://h:1:speed=3",
        "://h:1",
    ],
)
def test_a_wrong_address_is_a_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError):
        stock_address(text)


def test_other_names_are_no_addresses() -> None:
    assert [stock_address(text) for text in ("decode-0", "qwen3-32b:tp=4", "a/b.json")] == [None] * 3


def test_a_mismatched_pair_is_told_factor_by_factor(run: Run) -> None:
    mine = payload(8, {"dtype": "torch.float16"}, engine_id="decode", block_size=32, kv_cache_layout="LBNHC")
    with (
        nixl_listener({(0, tp): payload() for tp in range(4)}) as there,
        nixl_listener({(0, 0): mine}) as here,
    ):
        bare = run("diff", f"nixl://127.0.0.1:{here.port}", f"nixl://127.0.0.1:{there.port}", "-o", "json")
        known = run(
            "describe-topology", "-o", "json", "--from", f"nixl://127.0.0.1:{there.port}:model=qwen3-32b,name=Qwen/Qwen3-32B",
            "--to", f"nixl://127.0.0.1:{here.port}:model=qwen3-32b,tp=8",
        )  # fmt: skip
        assert here.alive
        assert there.alive
    assert (bare.code, known.code) == (1, 1)
    factors = {f["name"]: f for f in json.loads(bare.out)["factors"]}
    assert {name for name, f in factors.items() if f["differs"]} == {
        "layout", "compatibility_hash", "block_size",
    }  # fmt: skip
    assert (factors["block_size"]["ok"], factors["layout"]["ok"], factors["tp"]["local"]) == (
        True,
        False,
        "unknown",
    )
    pair = json.loads(known.out)["pairs"][0]
    assert {finding["code"] for finding in pair["findings"]} >= {"COMPAT_MISMATCH", "LAYOUT_MISMATCH"}


def test_a_pair_that_fits_has_the_same_topology_as_our_own_engines(run: Run) -> None:
    ranks = {(0, tp): payload() for tp in range(4)}
    with nixl_listener(ranks) as listener:
        live = f"nixl://127.0.0.1:{listener.port}:model=qwen3-32b,name=Qwen/Qwen3-32B"
        outcome = run("describe-topology", "-o", "json", "--from", live, "--to", "qwen3-32b:tp=8,layout=HND")
    planned = run("describe-topology", "-o", "json", "qwen3-32b:tp=8,layout=HND", "qwen3-32b:tp=4,layout=HND")
    assert outcome.code == planned.code == 0
    stock, ours = (json.loads(each.out)["pairs"][0] for each in (outcome, planned))
    assert (stock["reads"], stock["groups"], stock["findings"]) == (
        ours["reads"],
        ours["groups"],
        ours["findings"],
    )
    assert stock["request"] == ours["request"]
