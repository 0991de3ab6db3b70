"""NixlConnector's own rules, which are stricter than ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import Factor, compare
from kvd.topology.describe import describe
from kvd.topology.stock.rules import with_stock_rules

FACTS: dict[str, Any] = {
    "connector": "NixlConnector",
    "compatibility_hash": "0" * 16,
    "layout": "LBHNC",
    "block_size": 16,
    "regions": 64,
}


def stock(tp: int = 4, name: str = "prefill", **facts: Any) -> EngineGeometry:
    return EngineGeometry(name, "g", "", tp, 1, 1, (), FACTS | facts)


def judged(local: EngineGeometry, remote: EngineGeometry) -> dict[str, Factor]:
    return {f.name: f for f in with_stock_rules(compare(local, remote), local, remote)}


def test_alike_engines_fit() -> None:
    assert all(f.ok and not f.differs for f in judged(stock(), stock(name="decode")).values())


@pytest.mark.parametrize(
    ("local", "remote", "name", "ok"),
    [
        (stock(), stock(compatibility_hash="1" * 16), "compatibility_hash", False),
        (stock(block_size=32), stock(), "block_size", True),
        (stock(block_size=24), stock(), "block_size", False),
        (stock(), stock(block_size=32), "block_size", False),
        (stock(tp=2, block_size=32), stock(tp=4), "block_size", False),
        (stock(layout="LBNHC"), stock(), "layout", False),
        (stock(), stock(layout="LBNHC"), "layout", False),
        (stock(tp=8), stock(tp=4), "tp", True),
        (stock(tp=4), stock(tp=6), "tp", False),
        (stock(tp=0), stock(tp=6), "tp", True),
        (stock(), stock(regions=32), "regions", False),
    ],
)
def test_a_difference_is_judged_as_the_connector_does(
    local: EngineGeometry, remote: EngineGeometry, name: str, ok: bool
) -> None:
    assert judged(local, remote)[name].ok == ok


def test_the_hash_is_explained_by_what_is_known_of_its_factors() -> None:
    local, remote = stock(dtype="float16"), stock(dtype="bfloat16", compatibility_hash="1" * 16)
    found = judged(local, remote)
    assert found["compatibility_hash"].note.endswith("what differs is dtype")
    assert not found["dtype"].ok, "harmless to us, and refused by NixlConnector"


def test_what_hides_behind_the_hash_is_said_to_be_unknown() -> None:
    assert "hides why" in judged(stock(), stock(compatibility_hash="1" * 16))["compatibility_hash"].note


def test_our_own_engines_are_judged_by_our_rules() -> None:
    ours = replace(stock(), facts={"layout": "LBNHC"})
    factors = compare(ours, stock())
    assert with_stock_rules(factors, ours, stock()) == factors


def test_two_addresses_of_one_engine_are_an_error() -> None:
    codes = {finding.code: finding.severity for finding in describe(stock(), stock()).findings}
    assert codes == {"ENGINE_ID_MISMATCH": "error", "MODEL_UNKNOWN": "info"}
    assert {f.code for f in describe(stock(name="decode"), stock()).findings} == {"MODEL_UNKNOWN"}
