"""`kvctl agents` against real kvds and workers with real backends: what a dead prefiller leaves, and its end."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.processes.errors import WorkerFailed
from tests.kvctl.conftest import Outcome, Run
from tests.support.daemons import wait_for
from tests.support.simulated_pair import Pair, simulated_pair

PEER = "prefill-engine"


class Asking:
    """kvctl, at the decoder's host."""

    def __init__(self, run: Run, pair: Pair) -> None:
        self._run = run
        self.pair = pair

    def say(self, *words: str) -> Outcome:
        return self._run("--runtime-dir", self.pair.decode_host.directory, "agents", *words)

    def rows(self) -> list[dict[str, Any]]:
        outcome = self.say("-o", "json", "--peer", PEER)
        assert outcome.code == 0, outcome.err
        rows: list[dict[str, Any]] = json.loads(outcome.out)["agents"]
        return rows

    def in_state(self, state: str) -> dict[str, Any]:
        """The only row, once it is in that state."""

        def look() -> dict[str, Any] | None:
            return next((row for row in self.rows() if row["state"] == state), None)

        return wait_for(look, 30.0)

    def evict(self, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        outcome = self.say("evict", "-o", "json", *words)
        return outcome.code, json.loads(outcome.out)["evicted"] if outcome.out else [], outcome.err


@pytest.fixture(params=["nixl", "mooncake", "direct"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "direct":
        pytest.importorskip(name)
    return name


@pytest.fixture
def asking(run: Run, backend: str, tmp_path: Path) -> Iterator[Asking]:
    with simulated_pair(tmp_path, backend) as pair:
        assert pair.load(pair.offered()) == ""
        yield Asking(run, pair)


def test_the_memory_of_a_host_that_died_stays_until_it_is_evicted(asking: Asking, backend: str) -> None:
    live = asking.in_state("live")
    assert (live["peer"], live["use"], live["lanes"], live["loads"]) == (PEER, "reads", 1, 0)
    assert live["backend"] == backend
    assert live["peer_bytes"] == live["registered_bytes"] > 0  # both simulated engines have as much
    assert live["pinned_bytes"] == 0
    asking.pair.kill_prefill_host()
    # The system shows a direct lane that the process has ended. Of another one kvd knows that it hears nothing.
    gone = asking.in_state("gone" if backend == "direct" else "away")
    assert gone["since"] or backend == "direct"
    # NIXL does not say what it maps; Mooncake maps nothing to read over a network, nor direct what is in no memfd.
    assert gone["pinned_bytes"] == (live["peer_bytes"] if backend == "nixl" else 0)
    assert (gone["mapped_bytes"] is None) == (backend == "nixl")
    assert "gone: 1 peer, 1 lane, " in asking.say().out
    name = f"{PEER}@{gone['generation']}"
    assert asking.say("-o", "name").out == f"{name}\n"
    # Without a word for it nothing is done.
    assert asking.evict(name)[0] == 0
    assert asking.rows()
    code, evicted, _ = asking.evict(name, "--yes")
    assert code == 0
    assert [(one["lanes"], one["left"], one["freed_bytes"]) for one in evicted] == [
        (1, 0, gone["pinned_bytes"])
    ]
    assert asking.rows() == []
    code, _, said = asking.evict(name, "--yes")
    assert code == 1
    assert "KVD-EVICT-UNKNOWN" in said


@pytest.mark.parametrize("backend", ["nixl"], indirect=True)
def test_the_lane_to_a_peer_that_lives_is_made_again_with_the_next_load(asking: Asking) -> None:
    asking.in_state("live")
    code, evicted, _ = asking.evict(PEER, "--yes")
    assert (code, [one["left"] for one in evicted]) == (0, [0])
    assert asking.rows() == []
    assert asking.pair.load(asking.pair.offered()) == ""
    assert asking.in_state("live")["lanes"] == 1


@pytest.mark.parametrize("backend", ["nixl", "mooncake"], indirect=True)
def test_a_lane_is_closed_by_itself_when_kvd_hears_of_its_peers_end(asking: Asking) -> None:
    asking.in_state("live")
    asking.pair.kill_prefiller()
    wait_for(lambda: not asking.rows(), 30.0)


@pytest.mark.parametrize("backend", ["mooncake"], indirect=True)
def test_a_lane_in_use_is_evicted_by_force_alone_and_its_load_is_a_miss(asking: Asking) -> None:
    pair, offered = asking.pair, asking.pair.offered()
    said: list[str] = []

    def load() -> None:
        try:
            said.append(pair.load(offered))
        except WorkerFailed as miss:
            said.append(str(miss))

    pair.prefill.process.send_signal(signal.SIGSTOP)  # so its kernel takes the questions and nobody answers
    try:
        loading = threading.Thread(target=load)
        loading.start()
        row = wait_for(lambda: next((one for one in asking.rows() if one["loading_bytes"]), None), 30.0)
        assert row["loads"] == 1
        code, _, refused = asking.evict(PEER, "--yes")
        assert code == 5
        assert "1 loads of prefill-engine are under way at decode-engine/tp0" in refused
        assert not said
        code, evicted, _ = asking.evict(PEER, "--yes", "--force")
        assert code == 0
        assert [(one["loads"], one["left"]) for one in evicted] == [(1, 0)]
        loading.join(30.0)
        assert "an operator had its lane closed (uid" in said[0]
    finally:
        pair.prefill.process.send_signal(signal.SIGCONT)
    assert pair.load(pair.offered()) == ""
