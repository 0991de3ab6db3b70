"""One real engine, hosted as the demo and the other end-to-end tests host theirs; no connector."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.demo.models import prompt
from kvctl.processes.errors import EngineStartFailed
from kvctl.processes.tree import shared_memory
from tests.support import nursery
from tests.support.deployments import found_out
from tests.support.engine_calls import abort, engine_metrics, running_engine
from tests.support.engine_pids import engine_pids
from tests.support.forgetting import forget_prefixes
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]

PARENT = """
import sys, time
from pathlib import Path
from kvctl.demo.engine import EngineProcess
from tests.support.engine_pids import engine_pids

from kvctl.demo.engine_spec import EngineSpec
model, work, cache = map(Path, sys.argv[1:])
engine = EngineProcess.start(EngineSpec(model=model, work_dir=work, log_path=work / "log", cache_dir=cache))
engine.wait_ready()
print(*engine_pids(engine).all, flush=True)
time.sleep(600)
"""


def gone(pids: tuple[int, ...], within: float) -> bool:
    """Whether none of the processes is left after at most so many seconds."""
    deadline = time.monotonic() + within
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return found_out(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def engine(model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    work = tmp_path_factory.mktemp("engine")
    spec = EngineSpec(model=model, work_dir=work, log_path=work / "log", cache_dir=cache)
    with running_engine(spec) as running:
        running.wait_ready()
        pids = engine_pids(running).all
        yield running
    assert gone(pids, within=0.0)


def test_answers_are_deterministic_and_depend_on_an_early_token(engine: EngineProcess) -> None:
    tokens = prompt(1, 1000)
    changed = [*tokens[:5], tokens[5] ^ 1, *tokens[6:]]
    first, other = (future.result(60) for future in (engine.submit(tokens, 24), engine.submit(changed, 24)))
    again = engine.submit(tokens, 24, request_id="again").result(60)
    assert (first.error, len(first.token_ids), first.finish_reason) == ("", 24, "length")
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids
    assert again.request_id == "again"
    assert again.num_cached_tokens
    assert again.first_token_seconds is not None
    assert again.first_token_seconds <= again.total_seconds
    assert again.kv_transfer_params is None


def test_an_aborted_request_ends_early_and_frees_its_blocks(engine: EngineProcess) -> None:
    future = engine.submit(prompt(2, 50), 4000, request_id="long")
    time.sleep(0.3)
    abort(engine, "long")
    answer = future.result(30)
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) < 4000
    assert engine.submit(prompt(3, 50), 4).result(30).error == ""
    forget_prefixes(engine)


def test_a_request_that_cannot_be_served_fails_alone(engine: EngineProcess) -> None:
    assert "5000" in engine.submit(prompt(4, 5000), 4).result(30).error
    assert engine.submit(prompt(4, 50), 4).result(30).error == ""


def test_metrics_count_blocks(engine: EngineProcess) -> None:
    engine.submit(prompt(5, 50), 4).result(30)
    metrics = engine_metrics(engine)
    assert 0 < metrics.free_blocks <= metrics.num_blocks
    assert metrics.external_queries == metrics.external_hits == 0


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spec = EngineSpec(model=tmp_path / "missing", work_dir=tmp_path / "work", log_path=log)
    with running_engine(spec, nursery.start) as broken, pytest.raises(EngineStartFailed, match="missing"):
        broken.wait_ready()


def test_a_killed_parent_takes_the_whole_tree_along(model: Path, cache: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *map(str, (model, tmp_path, cache))], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = tuple(map(int, parent.stdout.readline().split()))
        assert len(pids) >= 3
        segments = shared_memory(list(pids))
        assert segments
        # A stopped member must not be what saves the tree.
        os.kill(pids[2], signal.SIGSTOP)
        parent.kill()
    assert gone(pids, within=10.0)
    assert not any(path.exists() for path in segments)
