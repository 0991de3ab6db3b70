"""`kvctl probe`: many well-formed questions, and whether the listener serves on."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from tests.kvctl.engines.test_stock import payload
from tests.kvctl.stock.test_mooncake_bootstrap import answering, engine
from tests.kvctl.views.test_formats import check
from tests.support.stock_listeners import nixl_listener, saying

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


def test_many_questions_leave_the_listener_as_it_was(run: Run) -> None:
    with nixl_listener({(0, 0): payload()}) as listener:
        outcome = run("probe", f"nixl://127.0.0.1:{listener.port}", "--count", "200", "-o", "json")
        assert listener.asked == [(0, 0)] * 200
        assert listener.alive
    document = json.loads(outcome.out)
    check(document)
    assert outcome.code == 0
    assert (document["answered"], document["engine_ids"], document["code"]) == (200, ["prefill"], "")
    assert 0 < document["median"] <= document["p99"] <= document["longest"]


def test_who_serves_on_is_told_so(run: Run) -> None:
    with nixl_listener({(0, 0): payload()}) as listener:
        outcome = run("probe", f"nixl://127.0.0.1:{listener.port}")
    assert outcome.out.splitlines()[-1] == "it serves on"


def test_a_bootstrap_server_is_probed_too(run: Run) -> None:
    with saying(answering({"0": engine(2)})) as port:
        outcome = run("probe", f"mooncake://127.0.0.1:{port}", "--count", "3", "-o", "json")
    assert (outcome.code, json.loads(outcome.out)["answered"]) == (0, 3)


def test_no_answer_is_4_and_has_its_code(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcome = run("probe", f"nixl://127.0.0.1:{port}", "-o", "json")
    assert outcome.code == 4
    assert json.loads(outcome.out)["code"] == "KVD-STOCK-UNREACHABLE"


def test_another_start_of_the_engine_meanwhile_is_1(run: Run) -> None:
    ranks = {(0, 0): payload()}
    answers = iter([payload(), payload(agent_metadata=b"of the next start")] * 2)

    class Restarting(dict[tuple[int, int], bytes]):
        def __getitem__(self, key: tuple[int, int]) -> bytes:
            return next(answers)

    with nixl_listener(Restarting(ranks)) as listener:
        outcome = run("probe", f"nixl://127.0.0.1:{listener.port}", "--count", "2")
    assert outcome.code == 1
    assert "PEER_REINCARNATED" in outcome.out


def test_other_names_are_a_wrong_usage(run: Run) -> None:
    assert run("probe", "decode-0").code == 2
