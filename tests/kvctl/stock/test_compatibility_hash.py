"""A hash says nothing until the factors that it was made of are tried."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.stock.compatibility_hash import NamedModel, opened
from kvctl.stock.nixl_metadata import StockWorker, decode
from tests.support.stock_listeners import FIRST_FIELDS, stock_factors, stock_metadata, stock_payload

MODEL = NamedModel(("qwen3-32b", "Qwen/Qwen3-32B"), 8, 128, 64)


def worker(**factors: Any) -> StockWorker:
    return decode(stock_payload(stock_metadata(), stock_factors(**factors)), "here")


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({"dtype": "torch.float32"}, ("dtype", "float32")),
        ({"cache_dtype": "fp8_e5m2"}, ("cache_dtype", "fp8_e5m2")),
        ({"vllm_version": "0.33.0", "nixl_connector_version": 15}, ("vllm_version", "0.33.0")),
        ({"is_hma_enabled": False}, ("hybrid_manager", False)),
        ({"transfer_mode": "push"}, ("transfer_mode", "push")),
        ({"model": "qwen3-32b"}, ("model", "qwen3-32b")),
    ],
)
def test_each_factor_is_found(changed: dict[str, Any], seen: tuple[str, object]) -> None:
    found = opened(worker(**changed), MODEL)
    assert found is not None
    assert getattr(found, seen[0]) == seen[1]


def test_vllm_0_26_hashes_fewer_factors() -> None:
    old = stock_factors(vllm_version="0.26.0", nixl_connector_version=5, cross_layers_blocks=True)
    del old["speculative_config"], old["transfer_mode"]
    whole = stock_metadata()
    found = opened(decode(stock_payload({n: whole[n] for n in FIRST_FIELDS}, old), "here"), MODEL)
    assert found is not None
    assert (found.vllm_version, found.nixl_connector_version, found.transfer_mode) == ("0.26.0", 5, None)


def test_a_version_that_nobody_knows_is_tried_where_it_is_given() -> None:
    patched = worker(vllm_version="0.32.0+ours")
    assert opened(patched, MODEL) is None
    found = opened(patched, MODEL, ("0.32.0+ours",))
    assert found is not None
    assert found.vllm_version == "0.32.0+ours"


def test_another_model_opens_nothing() -> None:
    assert opened(worker(num_kv_heads=4), MODEL) is None
