"""`kvctl doctor --from --to`: what is wrong with a pair of engines behind stock connectors."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from kvctl.doctor.stock_checks import stock_checks
from kvctl.errors import UsageError
from tests.kvctl.engines.test_stock import payload
from tests.kvctl.stock.test_mooncake_bootstrap import answering, engine
from tests.support.stock_listeners import nixl_listener, saying

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run

HERE = "nixl://127.0.0.1"


def found(from_: str, to: str) -> dict[str, str]:
    """The state of each check, by its code."""
    return {check.code: check.state for check in stock_checks(from_, to, 1)}


def test_a_pair_that_fits_is_well() -> None:
    with (
        nixl_listener({(0, 0): payload()}) as one,
        nixl_listener({(0, 0): payload(engine_id="decode")}) as other,
    ):
        states = found(f"{HERE}:{one.port}", f"{HERE}:{other.port}")
        assert one.alive
        assert other.alive
    assert states == {"LISTENER": "ok", "ADVERTISED_HOST_LOOPBACK": "warning", "STOCK_PAIR": "ok"}


def test_one_engine_at_both_addresses_is_seen() -> None:
    with nixl_listener({(0, 0): payload()}) as one:
        assert found(f"{HERE}:{one.port}", f"{HERE}:{one.port}")["ENGINE_ID_MISMATCH"] == "failed"


def test_a_dead_listener_is_told_from_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with saying(b"HTTP/1.1 400 Bad Request\r\n" * 4) as web:
        states = found(f"{HERE}:{port}", f"{HERE}:{web}")
    assert states == {"LISTENER_DEAD": "failed", "PORT_CLASH": "failed", "STOCK_PAIR": "skipped"}


@pytest.mark.parametrize(
    ("theirs", "factors", "code"),
    [
        ({}, {"dtype": "torch.float16"}, "COMPAT_MISMATCH"),
        ({"kv_cache_layout": "LBNHC"}, {}, "LAYOUT_MISMATCH"),
        ({"block_size": 24}, {}, "BLOCK_GEOMETRY"),
    ],
)
def test_what_does_not_fit_is_named(theirs: dict[str, Any], factors: dict[str, str], code: str) -> None:
    reader = payload(factors=factors, engine_id="decode", **theirs)
    with nixl_listener({(0, 0): payload()}) as source, nixl_listener({(0, 0): reader}) as other:
        assert found(f"{HERE}:{source.port}", f"{HERE}:{other.port}")[code] == "failed"


def test_sizes_that_cannot_be_mapped() -> None:
    with (
        nixl_listener({(0, 0): payload()}) as one,
        nixl_listener({(0, 0): payload(engine_id="decode")}) as other,
    ):
        assert found(f"{HERE}:{one.port}:tp=4", f"{HERE}:{other.port}:tp=6")["TP_UNSUPPORTED"] == "failed"


def test_an_engine_that_restarts_is_another_one() -> None:
    answers = iter([payload(), payload(agent_metadata=b"of the next start")] * 4)

    class Restarting(dict[tuple[int, int], bytes]):
        def __getitem__(self, key: tuple[int, int]) -> bytes:
            return next(answers)

    with nixl_listener(Restarting()) as one, nixl_listener({(0, 0): payload(engine_id="decode")}) as other:
        assert found(f"{HERE}:{one.port}", f"{HERE}:{other.port}")["PEER_REINCARNATED"] == "failed"


def test_a_rank_that_did_not_register() -> None:
    told = engine(8)
    del told["worker_addr"]["3"]
    with saying(answering({"0": told})) as port, nixl_listener({(0, 0): payload()}) as reader:
        states = found(f"mooncake://127.0.0.1:{port}", f"{HERE}:{reader.port}")
    assert states["RANK_NOT_REGISTERED"] == "failed"


def test_the_command_asks_no_kvd(run: Run) -> None:
    with (
        nixl_listener({(0, 0): payload()}) as one,
        nixl_listener({(0, 0): payload(engine_id="decode")}) as other,
    ):
        outcome = run(
            "doctor", "--from", f"{HERE}:{one.port}", "--to", f"{HERE}:{other.port}", "-o", "json",
            "--socket", "/nowhere/at/all",
        )  # fmt: skip
    assert outcome.code == 0
    assert {check["about"] for check in json.loads(outcome.out)["checks"]} == {"transfers"}


def test_half_a_pair_is_a_wrong_usage(run: Run) -> None:
    half = run("doctor", "--from", "nixl://localhost:5600")
    assert (half.code, "--to is missing" in half.err) == (2, True), half.err
    with pytest.raises(UsageError):
        found("decode-0", "nixl://localhost:5600")
