"""`kvctl diff`: two sources, factor by factor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.query import EngineList, ListEngines
from tests.kvctl.conftest import ENGINES, engine_row
from tests.kvctl.views.test_formats import check

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run


def test_engines_that_agree_are_0(run: Run) -> None:
    outcome = run("diff", "qwen3-32b:tp=4", "qwen3-32b:tp=4,layout=NHD")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1].startswith("no difference in ")


def test_a_handled_difference_is_1(run: Run) -> None:
    outcome = run("diff", "qwen3-32b:tp=4", "qwen3-32b:tp=8", "-o", "json")
    document = json.loads(outcome.out)
    check(document)
    assert (outcome.code, outcome.err) == (1, "")
    assert (document["kind"], document["same"], document["compatible"]) == ("Diff", False, True)
    assert {f["name"] for f in document["factors"] if f["differs"]} == {"tp"}


def test_a_fatal_difference_is_told_as_such(run: Run) -> None:
    outcome = run("diff", "qwen3-32b:tp=4", "qwen3-32b:tp=4,cache_dtype=fp8")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert next(line for line in lines if line.startswith("cache_dtype")).split()[:4] == [
        *("cache_dtype", "auto", "fp8", "FATAL"),
    ]
    assert lines[-1].endswith("2 fatally")


def test_wide_shows_the_factors_that_agree_too(run: Run) -> None:
    narrow = run("diff", "qwen3-32b:tp=4", "qwen3-32b:tp=8").out
    wide = run("diff", "qwen3-32b:tp=4", "qwen3-32b:tp=8", "-o", "wide").out
    assert "head_size" not in narrow
    assert "head_size" in wide


def test_two_running_engines_are_asked_for_in_one_question(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("diff", "decode-0", "prefill-1", "-o", "json", "--socket", daemon.directory)
    document = json.loads(outcome.out)
    assert (outcome.code, len(daemon.asked)) == (1, 1)
    assert {f["name"] for f in document["factors"] if f["differs"]} == {"tp"}


def test_one_argument_is_not_enough(run: Run) -> None:
    outcome = run("diff", "qwen3-32b")
    assert (outcome.code, outcome.out) == (2, "")
    assert "Missing argument 'B'" in outcome.err


def test_other_weights_are_told_with_the_setting_that_lets_them_pass(run: Run, daemon: FakeDaemon) -> None:
    other = engine_row("prefill-1", "prefill", 2, model="another")
    daemon.answers[ListEngines] = lambda _: EngineList(rows=(ENGINES[0], other))
    outcome = run("diff", "decode-0", "prefill-1", "--socket", daemon.directory)
    assert outcome.code == 1
    hint = next(line for line in outcome.out.splitlines() if line.startswith("  weights: "))
    assert 'set "weights" in kv_connector_extra_config' in hint


def test_running_engines_with_unlike_backends_do_not_fit_as_kvd_says(run: Run, daemon: FakeDaemon) -> None:
    row = engine_row("prefill-1", "prefill", 4)
    assert row.card is not None
    workers = tuple(msgspec.structs.replace(worker, backend="direct") for worker in row.card.workers)
    other = msgspec.structs.replace(row, card=msgspec.structs.replace(row.card, workers=workers))
    daemon.answers[ListEngines] = lambda _: EngineList(rows=(ENGINES[0], other))
    outcome = run("diff", "decode-0", "prefill-1", "-o", "json", "--socket", daemon.directory)
    document = json.loads(outcome.out)
    assert (outcome.code, document["compatible"]) == (1, False)
    (backend,) = [factor for factor in document["factors"] if factor["name"] == "backend"]
    assert (backend["local"], backend["remote"], backend["ok"]) == ("nixl", "direct", False)
