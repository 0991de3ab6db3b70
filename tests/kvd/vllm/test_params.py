"""The proxy contract in both directions: what routers carry, and what is wrong with it when something is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvd.vllm.errors import BadParams
from kvd.vllm.params import finished_prefill, read_remote_prefill, wants_prefill_here, wants_remote_prefill
from tests.support.raising import raises
from tests.support.rigs.bench import prefill

FROM_ROUTER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def returned() -> dict[str, Any]:
    """A prefiller's params after their way through a router's JSON."""
    made: dict[str, Any] = json.loads(json.dumps(finished_prefill(SENT, tp=2, pp=1, dcp=1)))
    return made


SENT = prefill(((3, 4), (7,)), tokens=9, first=(2, 0))


def test_the_prefill_request_asks_for_a_decode_elsewhere() -> None:
    assert wants_prefill_here(FROM_ROUTER)
    assert not wants_remote_prefill(FROM_ROUTER)


@pytest.mark.parametrize("params", [None, {}])
def test_a_request_without_params_is_nobodys(params: dict[str, Any] | None) -> None:
    assert not wants_prefill_here(params)
    assert not wants_remote_prefill(params)


def test_what_a_prefiller_returns_is_what_the_decoder_reads() -> None:
    params = returned()
    assert wants_remote_prefill(params)
    assert not wants_prefill_here(params)
    read = read_remote_prefill(params, own_engine_id="d")
    assert read == SENT
    assert {g: (b.first, b.ids.tolist()) for g, b in read.block_lists().items()} == {
        0: (2, [3, 4]),
        1: (0, [7]),
    }


def test_the_names_are_those_of_stock_connectors() -> None:
    ours = {name for name in returned() if name.startswith("kvd_")}
    assert set(returned()) - ours == {
        "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_host", "remote_port",
        "remote_block_ids", "remote_num_tokens", "tp_size", "pp_size", "dcp_size", "transfer_mode",
    }  # fmt: skip


def test_what_a_router_adds_is_passed_over() -> None:
    assert read_remote_prefill({**returned(), "router_note": {"a": 1}}) == SENT


NEEDED = (
    "remote_engine_id", "remote_request_id", "kvd_host", "kvd_port", "remote_block_ids", "remote_num_tokens",
    "kvd_first_blocks", "kvd_generation", "kvd_lease_seconds", "kvd_lease_opened", "kvd_digest",
    "kvd_seal",
)  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_entry_is_named(name: str) -> None:
    params = returned()
    del params[name]
    with raises("KVD-CONNECTOR-PARAMS", match=f"lack {name}: hand on what the prefiller returned, unchanged"):
        read_remote_prefill(params)


@pytest.mark.parametrize("name", NEEDED)
def test_an_entry_of_another_type_is_named(name: str) -> None:
    with pytest.raises(BadParams, match=f"got `object`, at {name}$"):
        read_remote_prefill({**returned(), name: {}})


HUGE = 10**5000


def ascii_ids(value: object) -> str:
    """Python writes no number of so many digits."""
    try:
        return ascii(value)[:40]
    except ValueError:
        return "huge"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kvd_contract", 1, "kvd_contract 1, this side speaks 2"),
        ("kvd_contract", "2", "kvd_contract '2', this side speaks 2"),
        ("kvd_contract", True, "kvd_contract True, this side speaks 2"),
        ("kvd_contract", [2], "kvd_contract of type list, this side speaks 2"),
        ("kvd_contract", "x" * 1000, "kvd_contract '" + "x" * 70),
        ("do_remote_prefill", "true", "do_remote_prefill 'true', that must be true or false"),
        ("do_remote_prefill", [1], "do_remote_prefill of type list"),
        ("kvd_digest", "", "kvd_digest is empty"),
        ("kvd_seal", "", "kvd_seal is empty"),
        ("kvd_port", "7", "got `str`, at kvd_port"),
        ("kvd_port", 7.5, "got `float`, at kvd_port"),
        ("kvd_host", "\ud800", "kvd_host: half a surrogate pair is no text"),
        ("remote_num_tokens", 1e300, "remote_num_tokens is 1000"),
        ("remote_num_tokens", True, "got `bool`, at remote_num_tokens"),
        ("kvd_lease_seconds", "30", "got `str`, at kvd_lease_seconds"),
        ("remote_block_ids", [[3.5, 4], [7]], "got `float`"),
        ("remote_block_ids", [[[3]], [7]], "got `array`"),
        ("kvd_contract", None, "the prefiller does not run KvdConnector"),
        ("remote_block_ids", [3, 4], r"got `int`, at remote_block_ids\[0\]"),
        ("remote_block_ids", [[3, "4"], [7]], "got `str`"),
        ("remote_block_ids", [[3, -1], [7]], "-1 is no block"),
        ("remote_block_ids", [[3, 1 << 70], [7]], "is no block"),
        ("kvd_first_blocks", [-2, 0], "-2 is no block"),
        ("kvd_first_blocks", [0], "of 2 groups and kvd_first_blocks of 1"),
        ("remote_num_tokens", -1, "remote_num_tokens is -1"),
        ("kvd_port", 70000, "kvd_port is 70000"),
        ("kvd_generation", "", "kvd_generation is empty"),
        ("kvd_generation", "x" * 513, "of length <= 512, at kvd_generation"),
        ("remote_engine_id", "x" * 513, "of length <= 512, at remote_engine_id"),
        ("kvd_host", "x" * 513, "of length <= 512, at kvd_host"),
        ("kvd_lease_seconds", float("inf"), "kvd_lease_seconds is inf"),
        ("kvd_lease_opened", float("nan"), "kvd_lease_opened is nan"),
        ("kvd_lease_seconds", -1.0, "kvd_lease_seconds is -1"),
        ("remote_num_tokens", HUGE, "remote_num_tokens is a number of 16610 bits"),
        ("kvd_port", HUGE, "kvd_port is a number of 16610 bits"),
        ("kvd_contract", HUGE, "kvd_contract a number of 16610 bits"),
        ("remote_block_ids", [[3, HUGE], [7]], "a number of 16610 bits is no block"),
        ("kvd_lease_seconds", HUGE, "kvd_lease"),
        ("remote_block_ids", [["\ud800"], [7]], "remote_block_ids: half a surrogate pair is no text"),
        ("kvd_first_blocks", ["\ud800", 7], "kvd_first_blocks: half a surrogate pair is no text"),
        ("kvd_host", {"\ud800": 7}, "got `object`, at kvd_host"),
    ],
    ids=ascii_ids,
)
def test_a_value_that_means_nothing_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(BadParams, match=said):
        read_remote_prefill({**returned(), name: value})


def through(numbers: Callable[[int | float], int | float], value: Any) -> Any:
    """Params after a router that writes numbers in its own way."""
    if isinstance(value, dict):
        return {name: through(numbers, part) for name, part in value.items()}
    if isinstance(value, list):
        return [through(numbers, part) for part in value]
    return numbers(value) if type(value) in (int, float) else value


@pytest.mark.parametrize("numbers", [float, lambda n: int(n) if n == int(n) else n], ids=["30.0", "30"])
def test_a_router_may_write_30_for_30_0_and_the_other_way_round(numbers: Any) -> None:
    params = through(numbers, returned())
    assert read_remote_prefill(params) == SENT


def test_where_a_router_rewrote_remote_host_kvds_own_address_counts() -> None:
    params = {**returned(), "remote_host": "10.0.0.1", "remote_port": 8100}
    assert (read_remote_prefill(params).host, read_remote_prefill(params).port) == (SENT.host, SENT.port)


def test_params_without_kvds_own_address_are_read_as_before() -> None:
    params = {name: value for name, value in returned().items() if name not in ("kvd_host", "kvd_port")}
    assert read_remote_prefill(params) == SENT


@pytest.mark.parametrize("params", [None, {}, [], ["do_remote_prefill"], "do_remote_decode", 7, True])
def test_what_is_no_set_of_params_asks_for_nothing(params: object) -> None:
    assert (wants_prefill_here(params), wants_remote_prefill(params)) == (False, False)


@pytest.mark.parametrize("value", [True, 1, 1.0])
def test_a_true_is_a_true_in_any_number(value: object) -> None:
    assert wants_prefill_here({"do_remote_decode": value})
    assert read_remote_prefill({**returned(), "do_remote_prefill": value}) == SENT


@pytest.mark.parametrize("value", ["true", "false", "1", [True], {"a": 1}, 2])
def test_text_never_asks_for_a_prefill_here(value: object) -> None:
    assert not wants_prefill_here({"do_remote_decode": value})


def test_a_request_that_asks_for_both_is_prefilled_here() -> None:
    both = {**returned(), "do_remote_decode": True}
    assert wants_prefill_here(both)
    assert not wants_remote_prefill(both)


NIXL = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "p",
    "remote_request_id": "r", "remote_host": "10.0.0.7", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip
MOONCAKE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_bootstrap_addr": "http://10.0.0.7:8998",
    "remote_engine_id": "p", "transfer_id": "x",
}  # fmt: skip


@pytest.mark.parametrize("params", [NIXL, MOONCAKE], ids=["NixlConnector", "MooncakeConnector"])
def test_params_of_another_connector_are_told_apart(params: dict[str, Any]) -> None:
    assert wants_remote_prefill(params)
    with pytest.raises(BadParams, match=r"kvd_contract None.*the prefiller does not run KvdConnector"):
        read_remote_prefill(params)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    "name", ["remote_block_ids", "kvd_contract", "do_remote_prefill", "kvd_host", "remote_engine_id"]
)
def test_lists_of_lists_of_lists_are_refused_like_anything_else(name: str) -> None:
    with pytest.raises(BadParams):
        read_remote_prefill({**returned(), name: nested(900)})


def test_an_engine_does_not_read_from_itself() -> None:
    with pytest.raises(BadParams, match=r"this very engine \(p\).*two engines share one id, or the router"):
        read_remote_prefill(returned(), own_engine_id="p")
