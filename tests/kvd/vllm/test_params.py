"""The proxy contract in both directions: what routers carry, and what is wrong with it when something is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.vllm.errors import BadParams
from kvd.vllm.params import finished_prefill, read_remote_prefill, wants_prefill_here, wants_remote_prefill
from tests.kvd.vllm.bench import prefill

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
    "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids", "remote_num_tokens",
    "kvd_first_blocks", "kvd_generation", "kvd_lease_seconds", "kvd_lease_opened",
)  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_entry_is_named(name: str) -> None:
    params = returned()
    del params[name]
    with pytest.raises(BadParams, match=f"lack {name}: hand on what the prefiller returned, unchanged"):
        read_remote_prefill(params)


@pytest.mark.parametrize("name", NEEDED)
def test_an_entry_of_another_type_is_named(name: str) -> None:
    with pytest.raises(BadParams, match=f"got `object`, at {name}$"):
        read_remote_prefill({**returned(), name: {}})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kvd_contract", 2, "kvd_contract 2, this side speaks 1"),
        ("kvd_contract", None, "the prefiller does not run KvdConnector"),
        ("remote_block_ids", [3, 4], r"got `int`, at remote_block_ids\[0\]"),
        ("remote_block_ids", [[3, "4"], [7]], "got `str`"),
        ("remote_block_ids", [[3, -1], [7]], "-1 is no block"),
        ("remote_block_ids", [[3, 1 << 70], [7]], "is no block"),
        ("kvd_first_blocks", [-2, 0], "-2 is no block"),
        ("kvd_first_blocks", [0], "of 2 groups and kvd_first_blocks of 1"),
        ("remote_num_tokens", -1, "remote_num_tokens is -1"),
        ("remote_port", 70000, "remote_port is 70000"),
        ("kvd_generation", "", "kvd_generation is empty"),
        ("kvd_lease_seconds", float("inf"), "kvd_lease_seconds is inf"),
        ("kvd_lease_opened", float("nan"), "kvd_lease_opened is nan"),
        ("kvd_lease_seconds", -1.0, "kvd_lease_seconds is -1"),
    ],
)
def test_a_value_that_means_nothing_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(BadParams, match=said):
        read_remote_prefill({**returned(), name: value})


def test_an_engine_does_not_read_from_itself() -> None:
    with pytest.raises(BadParams, match=r"this very engine \(p\).*two engines share one id, or the router"):
        read_remote_prefill(returned(), own_engine_id="p")
