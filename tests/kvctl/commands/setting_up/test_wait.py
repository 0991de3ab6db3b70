"""`kvctl wait` beside a real kvd that engines come to and leave."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvctl.commands.setting_up import wait as waiting
from kvd.wire.query import EngineList, GetStatus, ListEngines
from tests.kvctl.conftest import ENGINES, STATUS, FakeDaemon
from tests.support.daemons import Daemon, daemons, facts, process, scheduler, session, wait_for, worker

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


@pytest.fixture(scope="module")
def kvd() -> Iterator[Daemon]:
    with daemons() as [one]:
        yield one


@pytest.fixture
def after_the_first_look(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something happen once kvctl has looked and is about to wait."""

    def arrange(happens: Callable[[], object]) -> None:
        look, pending = waiting._look, [happens]

        def looked(*given: Any) -> Any:
            seen = look(*given)
            if pending:
                pending.pop()()
            return seen

        monkeypatch.setattr(waiting, "_look", looked)

    return arrange


def test_an_engine_is_waited_for_until_its_last_worker_is_there(
    run: Run, kvd: Daemon, after_the_first_look: Callable[..., None]
) -> None:
    card = facts("two", tp=2)
    with ExitStack() as engine:
        engine.enter_context(session(kvd, scheduler(card)))
        engine.enter_context(session(kvd, worker(card)))
        after_the_first_look(lambda: engine.enter_context(session(kvd, worker(card, 1))))
        outcome = run(
            "wait", "engine/two", "kvd", "--timeout", "20s", "--runtime-dir", kvd.directory, "-o", "json"
        )
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert {one["target"]: one["state"] for one in document["targets"]} == {
        "engine/two": "ready",
        "kvd": "ready",
    }
    seconds = {one["target"]: one["seconds"] for one in document["targets"]}
    assert seconds["kvd"] < seconds["engine/two"]


def test_an_engine_that_ends_is_gone(
    run: Run, kvd: Daemon, after_the_first_look: Callable[..., None]
) -> None:
    with process(kvd, "dying") as child:
        after_the_first_look(child.kill)
        outcome = run(
            "wait", "engine/dying", "--for=gone", "--timeout", "20s", "--runtime-dir", kvd.directory
        )
    assert (outcome.code, outcome.out.startswith("engine/dying is gone, after ")) == (0, True), outcome.err


def test_what_does_not_come_in_time_is_4_and_says_what_there_is(run: Run, kvd: Daemon) -> None:
    card = facts("half", tp=2)
    with session(kvd, worker(card)):
        wait_for(lambda: kvd.engines().get("half"))
        outcome = run("wait", "engine/half", "engine/hlf", "--timeout", "1s", "--runtime-dir", kvd.directory)
    assert (outcome.code, outcome.out) == (4, "")
    assert "half is partial, 1 of 2 ranks" in outcome.err
    assert "hlf" in outcome.err


def test_without_a_kvd_it_is_3_once_the_time_is_over(run: Run, tmp_path: Path) -> None:
    outcome = run("wait", "kvd", "--timeout", "300ms", "--runtime-dir", f"{tmp_path}/none")
    assert (outcome.code, outcome.out) == (3, "")
    assert "kvd.sock does not exist; that was so for 300ms; see" in outcome.err


def test_a_kvd_is_waited_for_until_it_serves_and_until_it_is_gone(
    run: Run, after_the_first_look: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-") as place:
        one = Daemon(Path(place) / "d0")
        here = ("kvd", "--timeout", "20s", "--runtime-dir", one.directory)
        knock = time.sleep

        def knocked(seconds: float) -> None:
            if one.process is None:
                one.start(wait=False)
            knock(seconds)

        monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=knocked, monotonic=time.monotonic))
        try:
            outcome = run("wait", *here)
            assert (outcome.code, outcome.out.startswith("kvd is ready, after ")) == (0, True), outcome.err
            after_the_first_look(one.stop)
            outcome = run("wait", "--for", "gone", *here)
        finally:
            one.kill()
    assert (outcome.code, outcome.out.startswith("kvd is gone, after ")) == (0, True), outcome.err


def test_a_kvd_that_was_just_started_does_not_make_engines_gone(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListEngines] = lambda _: EngineList(rows=())
    young = msgspec.structs.replace(STATUS, gauges={"uptime_seconds": 0.5})
    daemon.answers[GetStatus] = lambda _: young
    arguments = ("wait", "engine/x", "--for=gone", "--timeout", "1s", "--socket", daemon.directory)
    early = run(*arguments)
    assert (early.code, "was just started" in early.err) == (4, True)
    daemon.answers[GetStatus] = lambda _: STATUS
    assert run(*arguments).code == 0


def test_where_nothing_happens_kvd_is_hardly_asked(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListEngines] = lambda _: EngineList(rows=ENGINES[2:])
    daemon.events = ()
    outcome = run("wait", "engine/prefill-0", "--timeout", "500ms", "--socket", daemon.directory)
    assert outcome.code == 4
    assert sum(isinstance(message, ListEngines) for message in daemon.asked) <= 3


@pytest.mark.parametrize("target", ["decode-0", "engine/", "engines/x", "pod/decode-0"])
def test_what_cannot_be_waited_for_is_2(run: Run, target: str) -> None:
    outcome = run("wait", target, "--runtime-dir", "/nonexistent")
    assert outcome.code == 2
    assert "write kvd or engine/ID" in outcome.err
