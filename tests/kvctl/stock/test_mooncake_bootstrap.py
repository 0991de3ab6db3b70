"""Who has registered at Mooncake's bootstrap server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvctl.errors import KvctlError
from kvctl.stock.mooncake_bootstrap import query
from tests.support.stock_listeners import saying


def answering(body: Any, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n\r\n{json.dumps(body)}".encode()


def engine(tp: int, pp: int = 1, name: str = "prefill") -> dict[str, Any]:
    workers = {str(t): {str(p): f"tcp://10.0.0.1:{9000 + t}" for p in range(pp)} for t in range(tp)}
    return {"engine_id": name, "worker_addr": workers}


def test_sizes_follow_from_who_registered() -> None:
    with saying(answering({"0": engine(4, 2), "1": engine(1, name="other")})) as port:
        first, second = query("127.0.0.1", port).engines
    assert (first.engine_id, first.dp, first.tp, first.pp, first.missing) == ("prefill", 0, 4, 2, ())
    assert (second.engine_id, second.dp, second.tp, second.pp) == ("other", 1, 1, 1)
    assert first.workers[1, 3] == "tcp://10.0.0.1:9003"


def test_a_rank_that_did_not_register_is_missing() -> None:
    told = engine(8)
    del told["worker_addr"]["3"]
    with saying(answering({"0": told})) as port:
        assert query("127.0.0.1", port).engines[0].missing == ((0, 3),)


def test_nobody_registered_is_an_answer() -> None:
    with saying(answering({})) as port:
        assert query("127.0.0.1", port).engines == ()


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (answering({}, "404 Not Found"), "404 Not Found"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "and not with the workers"),
        (answering([1]), "no list of Mooncake's workers"),
        (answering({"x": engine(1)}), "'x' is no rank"),
        (answering({"0": {"engine_id": "p", "worker_addr": {"99999": {"0": "a"}}}}), "'99999' is no rank"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (9 << 20), "more than 8388608 bytes"),
    ],
)
def test_garbage_is_named(said: bytes, names: str) -> None:
    with saying(said) as port, pytest.raises(KvctlError, match=names) as caught:
        query("127.0.0.1", port, seconds=2)
    assert caught.value.code == "KVD-STOCK-GARBAGE"
