"""An engine of two stages of two ranks, a stage a host, with a wire between: ready, right, gone when a host is.

The workers are simulated: `kvd.worker` on memory of their own, with real kvds, keys and a real backend.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.simulate import BLOCKS, SimulatedEngine
from kvctl.processes.errors import WorkerFailed
from kvctl.processes.spawn import spawn
from kvctl.processes.worker_process import WorkerProcess, good
from kvd.client.operator import connect
from kvd.wire.query import EngineList, EngineRow, ListEngines
from tests.support.daemons import measured, wait_for
from tests.support.networks import Network, two_networks
from tests.support.servers import program

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

START_SECONDS = 120.0
GONE_SECONDS = 3.0


@dataclass(frozen=True)
class Place:
    """A kvd on a host."""

    name: str
    network: Network
    directory: Path
    port: int

    def engine(self, engine_id: str) -> EngineRow | None:
        """An engine as this kvd knows it."""
        with connect(self.directory, 10.0) as operator:
            answer = operator.ask(ListEngines())
        assert isinstance(answer, EngineList)
        return next((row for row in answer.rows if row.engine.engine_id == engine_id), None)

    def ready(self) -> EngineRow | None:
        """The engine that is on two hosts, if it is ready here."""
        row = self.engine("prefill")
        return row if row is not None and row.state == "ready" else None

    @property
    def address(self) -> str:
        """Where other kvds reach it."""
        return f"{self.network.address}:{self.port}"


@dataclass(frozen=True)
class Fleet:
    """The kvds of two hosts that share an engine, that of a decoder on the first of them, and both engines."""

    home: Place
    there: Place
    reader: Place
    prefill: SimulatedEngine
    decode: SimulatedEngine

    def handed_over(self, request: str, tokens: int) -> str:
        """Prefill a request, pull it, and compare every byte; the first difference, or empty."""
        blocks = self.prefill.allocate(tokens)
        for worker in self.prefill.workers:
            worker.ask(do="fill", request=request, blocks=blocks)
        offered = self.prefill.workers[0].ask(do="offer", request=request, blocks=blocks, tokens=tokens)
        return self.loaded(request, tokens, offered)

    def loaded(self, request: str, tokens: int, offered: dict[str, Any]) -> str:
        """Pull what was offered; the first difference, or empty. Raises `WorkerFailed` for a miss."""
        here = self.decode.allocate(tokens)
        done = self.decode.workers[0].ask(do="load", request=f"{request}-decode", blocks=here, **offered)
        return str(done["difference"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All of it, ready."""
    folder = tmp_path_factory.mktemp("h")
    with contextlib.ExitStack() as stack:
        first, second = stack.enter_context(two_networks())
        kvd = (sys.executable, "-m", "kvd.service")
        subprocess.run([*kvd, "--new-keys", folder / "keys"], check=True, capture_output=True)
        places = [
            Place(name, network, folder / name, port)
            for name, network, port in (("home", first, 7766), ("there", second, 7766), ("read", first, 7767))
        ]
        for place in places:
            place.directory.mkdir(mode=0o750)
            settings = {
                "listen": f"0.0.0.0:{place.port}",
                "advertise": place.address,
                "curve": {"key_file": str(folder / "keys")},
            }
            (place.directory / "kvd.yaml").write_text(json.dumps({"peer": settings}))  # JSON is YAML
            words = [
                *kvd,
                "--config",
                str(place.directory / "kvd.yaml"),
                "--runtime-dir",
                str(place.directory),
            ]
            stack.enter_context(program([*place.network.beside, *words], place.directory / "kvd.log"))
        home, there, reader = places
        for place in places:
            wait_for(lambda place=place: (place.directory / "kvd.sock").exists(), START_SECONDS)  # type: ignore[misc]
        by_rank = (home, home, there, there)
        prefill = [
            _started(stack, at, "prefill", (rank, 2, 2), home.address) for rank, at in enumerate(by_rank)
        ]
        decode = [_started(stack, reader, "decode", (0, 1, 1), "auto")]
        for worker in (*prefill, *decode):
            good(worker.name, worker.answer(START_SECONDS))
        free = list(range(1, BLOCKS))
        yield Fleet(home, there, reader, SimulatedEngine(prefill, free.copy()), SimulatedEngine(decode, free))


def _started(
    stack: contextlib.ExitStack, at: Place, role: str, place: tuple[int, int, int], home: str
) -> WorkerProcess:
    rank, ranks, stages = place
    log = at.directory / f"{role}-{rank}.log"
    words = [*at.network.beside, sys.executable, "-m", "kvctl.demo.simulated_worker"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(at.directory)}
    process = spawn(words, log, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=at.directory)
    worker = WorkerProcess(f"worker {rank} of {role}", process, log)
    stack.callback(worker.end, 0.0)
    stack.callback(worker.dismiss)
    worker.give(
        {
            "engine_id": role,
            "role": role,
            "rank": rank,
            "ranks": ranks,
            "stages": stages,
            "blocks": BLOCKS,
            "backend": "nixl",
            "runtime_dir": str(at.directory),
            "home": home,
        }
    )
    return worker


def test_kv_of_all_four_workers_comes_as_it_was_computed(fleet: Fleet) -> None:
    row, part = (wait_for(lambda at=at: at.ready()) for at in (fleet.home, fleet.there))  # type: ignore[misc]
    assert (len(row.ranks), len(part.ranks)) == (4, 2)
    assert row.generation == part.generation
    for number, tokens in enumerate((300, 900)):
        assert fleet.handed_over(f"request-{number}", tokens) == ""


def test_a_host_that_is_gone_takes_the_generation_with_it_within_three_seconds(fleet: Fleet) -> None:
    """And what was offered before is a miss, not something else's bytes; with the host comes the generation."""
    before = fleet.reader.engine("prefill")
    assert before is not None
    blocks = fleet.prefill.allocate(300)
    offered = fleet.prefill.workers[0].ask(do="offer", request="late", blocks=blocks, tokens=300)

    def gone() -> bool:
        row = fleet.reader.engine("prefill")
        return row is not None and row.state == "gone"

    fleet.there.network.cut()
    began = time.monotonic()
    try:
        wait_for(gone)
        seconds = time.monotonic() - began
        measured("a host that is gone is known at the reader's kvd", seconds)
        assert seconds < GONE_SECONDS
        with pytest.raises(WorkerFailed, match="has 2 of 4 workers"):
            fleet.loaded("late", 300, offered)
    finally:
        fleet.there.network.mend()

    assert wait_for(fleet.home.ready, 30.0).generation == before.generation
    assert fleet.handed_over("request-after", 300) == ""
