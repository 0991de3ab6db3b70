"""How benchmarks/serving sends requests and counts them, on engines that answer at once; its tables, on known times."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu.fleet import ROOT, SIZES, Fleet, Pair, PairSpec, Way
from benchmarks.gpu.report import Report, read
from benchmarks.gpu.tables import TABLES
from benchmarks.serving import tables
from benchmarks.serving.bench_serve import words_of
from benchmarks.serving.cells import arrivals, at_rate, mixed, one_at_a_time
from benchmarks.serving.halting import going, standing_still
from benchmarks.serving.in_host import FACTS, SERVE
from benchmarks.serving.measuring import measure
from benchmarks.serving.same_cores import bind, shares
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.errors import EngineGone
from kvd.wire.identity import Endpoint
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList, TransferRecord
from tests.support.halting import stands_still
from tests.support.rigs.bench import eventually

ANSWERED_IN = 0.020


class Engine:
    """Answers before it has been waited for; a decoder's ledger gets a record of what was handed over."""

    def __init__(self, side: str, ledger: list[TransferRecord]) -> None:
        self.side, self.ledger = side, ledger
        self.asked: list[dict[str, Any]] = []
        self.breaks: Exception | None = None

    def submit(self, *_: object) -> Future[Any]:
        return done(SimpleNamespace(error=""))

    def call(self, function: str, *arguments: Any) -> Future[Any]:
        if function == SERVE:
            return self.serve(arguments[0])
        if function == FACTS:
            return done({"async_scheduling": True})
        return done([True])

    def serve(self, request: dict[str, Any]) -> Future[Any]:
        if self.breaks is not None:
            broken: Future[Any] = Future()
            broken.set_exception(self.breaks)
            return broken
        self.asked.append(request)
        params = request["kv_transfer_params"]
        loaded = self.side == "d" and params is not None
        name = f"r-{len(self.asked)}"
        if loaded:
            self.ledger.append(record(str(params.get("kvd_transfer_id") or params.get("remote_request_id"))))
        at = time.monotonic()
        return done(
            {
                "got": at,
                "queued": at + 0.001,
                "scheduled": at + 0.002,
                "first": at + 0.018,
                "tokens": [(at + ANSWERED_IN, 1)] + [(at + 0.030, 2)] * (request["max_tokens"] > 1),
                "kv_transfer_params": {"remote_request_id": name} if self.side == "p" else None,
                "cached": 7 if loaded else 0,
            }
        )


class Host:
    """A kvd with a ledger."""

    def __init__(self, ledger: list[TransferRecord]) -> None:
        self.ledger = ledger

    def ask(self, question: object) -> object:
        if not isinstance(question, ListTransfers):
            return SimpleNamespace(endpoint=self.endpoint())
        rows = [LedgerRow(number, one) for number, one in enumerate(self.ledger, 1)]
        found = tuple(row for row in reversed(rows) if row.seq > question.after)
        return TransferList(rows=found[: question.limit], total=len(rows), more=False)

    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", 1)


def done(value: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


def record(name: str, state: Any = "done") -> TransferRecord:
    return TransferRecord(
        transfer_id=f"t-{name}", request_id="d", local_engine="d", local_rank="0", remote_engine="p",
        remote_generation="1", remote_request_id=name, backend="direct", mode="pull", state=state,
        started=time.time(), moments={"queued": -0.001, "reported": 0.002}, stages={"plan": 0.0005},
    )  # fmt: skip


def pair_of(way: Way, **what: Any) -> Pair:
    ledger: list[TransferRecord] = []
    prefill: Any = Engine("p", ledger)
    decode: Any = Engine("d", ledger)
    host: Any = Host(ledger)
    alone = way == "none"
    spec = PairSpec(kind="dense", way=way, mode=what.pop("mode", "pull"), **what)
    return Pair(spec, decode if alone else prefill, decode, (host, host), ("p", "d"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without kvds."""
    hosts: Any = None
    report = Report(tmp_path / "out")
    yield Fleet("cpu", SIZES["cpu"], tmp_path, tmp_path, report, 0, hosts)
    report.close()


def served(fleet: Fleet, pairs: Sequence[Pair], rounds: int = 2) -> list[dict[str, Any]]:
    """The lines of requests that count."""
    cells = (one_at_a_time(32, 2), mixed(((16, 0.5), (32, 0.5)), 500, 0.02))
    measure(fleet, pairs, cells, lambda pair: (pair.spec.mode,), rounds)
    lines = read([fleet.report.folder])
    return [line for line in lines if line["what"] == "served" and line["note"] is None]


def test_prompts_come_at_the_same_random_times_for_everybody_and_at_the_rate_that_was_asked_for() -> None:
    cell = at_rate(4096, 30, 2.0)
    assert arrivals(cell, 1) == arrivals(cell, 1) != arrivals(cell, 2)
    times = [one.after for one in arrivals(cell, 1)]
    assert len(times) == 60
    assert times[-1] == pytest.approx(2.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) < 0.5 / 30 < 2 / 30 < max(gaps)


def test_a_mix_has_as_many_of_each_length_as_its_weights_say_and_one_at_least() -> None:
    lengths = [one.tokens for one in arrivals(mixed(((512, 0.7), (4096, 0.25), (16000, 0.05)), 20, 1.0), 0)]
    assert [lengths.count(tokens) for tokens in (512, 4096, 16000)] == [14, 5, 1]
    few = [one.tokens for one in arrivals(mixed(((512, 0.9), (16000, 0.01)), 4, 1.0), 0)]
    assert sorted(few) == [512] * 3 + [16000]


def test_each_way_serves_the_same_prompts_and_every_request_is_a_line(fleet: Fleet) -> None:
    pairs = [pair_of("direct"), pair_of("direct", mode="push"), pair_of("stock-nixl"), pair_of("none")]
    lines = served(fleet, pairs)
    by_way = {
        (one.spec.way, one.spec.mode): [
            (line["round"], line["cell"], line["tokens"])
            for line in lines
            if (line["way"], line["mode"]) == (one.spec.way, one.spec.mode)
        ]
        for one in pairs
    }
    assert all(sorted(found) == sorted(by_way["none", "pull"]) for found in by_way.values())
    assert len(lines) == 4 * 2 * (2 + 10)
    assert [len(line["prompt_token_ids"]) for line in pairs[0].decode.asked[-10:]] == [  # type: ignore[attr-defined]
        one.tokens for one in arrivals(mixed(((16, 0.5), (32, 0.5)), 500, 0.02), 1)
    ]


def test_the_decoder_gets_what_the_prefiller_answered_or_in_pushes_what_the_router_chose(
    fleet: Fleet,
) -> None:
    pull, push, alone = pair_of("direct"), pair_of("direct", mode="push"), pair_of("none")
    served(fleet, [pull, push, alone], rounds=1)
    there: Any = [pair.prefill for pair in (pull, push)]
    here: Any = [pair.decode for pair in (pull, push, alone)]
    assert here[0].asked[0]["kv_transfer_params"] == {"remote_request_id": "r-1"}
    assert {one["max_tokens"] for one in there[0].asked} == {1}
    chosen = [one["kv_transfer_params"]["kvd_transfer_id"] for one in there[1].asked]
    assert [one["kv_transfer_params"]["kvd_transfer_id"] for one in here[1].asked] == chosen
    assert len(set(chosen)) == len(chosen)
    assert all(one["kv_transfer_params"] is None for one in here[2].asked)


def test_what_the_ledger_says_of_a_load_stands_beside_the_engines_times(fleet: Fleet) -> None:
    for line in served(fleet, [pair_of("direct")], rounds=1):
        assert line["load"]["state"] == "done"
        moments = line["load"]["moments"]
        assert moments["reported"] - moments["queued"] == pytest.approx(0.003, abs=1e-5)
        assert moments["received"] - moments["queued"] == pytest.approx(0.001, abs=1e-5)
        assert line["load"]["planning"] == 0.0005
        # The fake's record begins when the decoder got the prompt.
        assert moments["queued"] + 0.001 == pytest.approx(line["decode"]["got"], abs=0.05)
        assert line["decode"]["token"] - line["decode"]["got"] == pytest.approx(ANSWERED_IN, abs=1e-5)


def test_tokens_that_come_together_are_counted_each(fleet: Fleet) -> None:
    assert served(fleet, [pair_of("none")], rounds=1)[0]["between"] == [0.01, 0.0]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_request_that_fails_is_counted_and_nobody_waits_for_it(fleet: Fleet, side: str, mode: Any) -> None:
    pair = pair_of("direct", mode=mode)
    engine: Any = getattr(pair, side)
    engine.breaks = EngineGone("the engine ended")
    lines = served(fleet, [pair], rounds=1)
    assert len(lines) == 2 + 10
    assert {line["error"] for line in lines} == {"the engine ended"}
    assert "| 2, 0 |" in tables.serving(with_run(lines))


def with_run(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"run": 0, **line} for line in lines]


def line(way: str, seconds: float, **what: Any) -> dict[str, Any]:
    """A request whose decoder's first token came ``seconds`` after its receipt, 40 ms after the router's send."""
    made = {
        "what": "served", "run": 0, "kind": "dense", "cell": "a", "rate": 10.0, "round": 0, "note": None, "way": way,
        "mode": "pull", "gpus": ("0", "0"), "joined": False, "sent": 0.0, "error": "", "between": [0.01] * 3,
        "cached": 1,
        "prefill": {"got": 0.001, "queued": 0.002, "scheduled": 0.004, "first": 0.030, "answered": 0.031},
        "decode": {
            "got": 0.040, "queued": 0.041, "scheduled": 0.038 + seconds, "first": 0.039 + seconds,
            "token": 0.040 + seconds, "last": 0.070 + seconds,
        },
    }  # fmt: skip
    return made | what


def cells_of(text: str) -> list[list[str]]:
    return [row.strip("| ").split(" | ") for row in text.splitlines()[2:]]


def test_a_first_token_is_held_against_the_better_of_stock_nixls() -> None:
    lines = [
        line("direct", 0.010), line("stock-nixl", 0.020), line("stock-nixl", 0.0125, joined=True),
    ]  # fmt: skip
    over = {(row[3], row[5]): row[8] for row in cells_of(tables.serving(lines))}
    assert over == {
        ("direct", "by layer"): "0.80",
        ("stock-nixl", "by layer"): "1.60",
        ("stock-nixl", "by block"): "1.00",
    }


def test_the_middle_is_the_median_of_rounds_and_the_high_one_of_all_requests() -> None:
    seconds = [[0.010] * 9, [0.020] * 9, [0.030] * 8 + [0.090]]
    lines = [line("direct", one, round=number) for number, some in enumerate(seconds) for one in some]
    assert cells_of(tables.serving(lines))[0][7] == "20.0 / 90.0"


def test_a_cell_in_which_time_ended_does_not_count_where_another_round_of_it_does() -> None:
    over: dict[str, Any] = {"what": "round", "run": 0, "stage": "s", "number": 0}
    first = [line(way, 0.010, stage="s", cell=cell) for cell in "ab" for way in ("direct", "none")]
    again = [line(way, 0.030, stage="s", round=1) for way in ("direct", "none")]
    lines = [*first, over, *again, line("direct", 0.030, stage="s", round=1, cell="b")]
    assert [(row[2], row[3], row[6], row[7]) for row in cells_of(tables.serving(lines))] == [
        ("a", "direct", "2", "20.0 / 30.0"), ("a", "none", "2", "20.0 / 30.0"),
        ("b", "direct", "1", "10.0 / 10.0"), ("b", "none", "1", "10.0 / 10.0"),
    ]  # fmt: skip
    # Not one round is over: what there is.
    assert [row[6] for row in cells_of(tables.serving(first[:3]))] == ["1", "1", "1"]


def test_each_pairs_turn_has_a_rate_of_its_own() -> None:
    """Between the turns of two pairs of one way others have theirs."""
    turns = [(pair, start + 0.08 * n) for pair, start in (("one", 0.0), ("other", 500.0)) for n in range(4)]
    lines = [line("direct", 0.010, pair=pair, sent=sent) for pair, sent in turns]
    (row,) = cells_of(tables.serving(lines))
    assert row[11] == "12.5", "4 requests within 0.32 s"


def test_goodput_counts_requests_that_met_both_targets() -> None:
    late, slow = line("direct", 0.5), line("direct", 0.010, between=[0.050] * 3)
    lines = [line("direct", 0.010), late, slow]
    # The last token of all comes 0.57 s after the first was sent; each answer has 4 tokens.
    assert cells_of(tables.serving(lines))[0][11:14] == ["5.3", "21", "1.8"]


def test_the_parts_of_a_pull_add_up_to_its_first_token() -> None:
    moments = {
        "queued": 0.042,
        "received": 0.0422,
        "planned": 0.043,
        "posting": 0.0435,
        "posted": 0.044,
        "last": 0.045,
        "reported": 0.046,
    }
    load = {"state": "done", "planning": 0.0003, "moments": moments}
    found = tables.stages(line("direct", 0.010, load=load), push=False)
    named = dict(zip(tables.STAGES, found, strict=True))
    assert [named["order"], named["device"], named["plan"]] == pytest.approx([0.0002, 0.0005, 0.0008])
    whole = tables.STAGES.index("KV in all")
    parts = [one for number, one in enumerate(found) if number != whole]
    assert sum(one or 0.0 for one in parts) == pytest.approx(0.050)
    assert found[whole] == pytest.approx(sum(one or 0.0 for one in found[4:whole]))


def test_of_a_push_what_counts_begins_where_the_prefill_ends() -> None:
    push = line(
        "direct", 0.0, mode="push", load={"state": "done", "moments": {"last": 0.033, "reported": 0.034}}
    )
    push["decode"] |= {"got": 0.001, "scheduled": 0.035, "first": 0.037, "token": 0.038}
    found = dict(zip(tables.STAGES, tables.stages(push, push=True), strict=True))
    assert found["to the decoder"] is found["claim"] is found["post"] is None
    assert found["bytes"] == pytest.approx(0.003)
    assert found["KV in all"] == pytest.approx(0.005)
    assert tables.at_decoder(push) == pytest.approx(0.007)


def test_vllm_serve_gets_the_arguments_that_an_engine_of_the_fleet_has(tmp_path: Path) -> None:
    spec = EngineSpec(
        model=tmp_path / "model",
        work_dir=tmp_path,
        log_path=tmp_path / "log",
        enable_prefix_caching=False,
        kv_transfer_config={"kv_connector": "NixlConnector"},
        arguments={"enforce_eager": False, "async_scheduling": True, "compilation_config": {"mode": 0}},
    )
    words = words_of(spec, 8000)
    assert words[words.index("serve") + 1 :][:3] == [str(tmp_path / "model"), "--port", "8000"]
    assert {"--no-enable-prefix-caching", "--no-enforce-eager", "--async-scheduling"} < set(words)
    assert words[words.index("--kv-transfer-config") + 1] == '{"kv_connector": "NixlConnector"}'
    assert words[words.index("--compilation-config") + 1] == '{"mode": 0}'


def test_what_vllm_bench_serve_says_is_the_median_of_rounds() -> None:
    says = {
        "what": "bench serve", "run": 0, "kind": "dense", "way": "direct", "mode": "pull", "options": {},
        "gpus": ("0", "0"), "router": "vllm-router", "tokens": 4096, "rate": 10.0, "note": "steady", "failed": 0,
        "median_itl_ms": 4.0, "p99_itl_ms": 9.0, "p99_ttft_ms": 90.0, "request_throughput": 9.5,
        "output_throughput": 228.0, "request_goodput": 9.0,
    }  # fmt: skip
    lines = [says | {"median_ttft_ms": at} for at in (50.0, 70.0, 60.0)]
    lines.append(says | {"median_ttft_ms": 900.0, "note": "warm"})
    (row,) = cells_of(tables.bench_serve(lines))
    assert row[3:] == [
        "vllm-router", "direct", "pull", "by block", "60.0 / 90.0", "4.00 / 9.00", "9.5", "228.0", "9.0",
    ]  # fmt: skip


def test_each_table_has_its_place_on_the_page() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert [name for name in TABLES if f"<!-- gpu: {name} -->" not in page] == []


def test_each_role_has_a_quarter_of_the_cores() -> None:
    assert shares(range(7)) is None
    found = shares({*range(9)})
    assert found is not None
    assert (found.prefill, found.decode, found.rest) == ([0, 1], [2, 3], [4, 5, 6, 7, 8])


def test_all_threads_of_a_process_are_bound() -> None:
    program = "import threading; threading.Thread(target=input).start(); print('up', flush=True)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        one.stdout.readline()
        core = min(os.sched_getaffinity(0))
        bind(one.pid, [core])
        threads = [int(thread.name) for thread in Path(f"/proc/{one.pid}/task").iterdir()]
        assert len(threads) == 2
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}, {core}]
        one.communicate(b"\n")
    bind(one.pid, [core])


def test_busy_engines_stand_still_but_while_they_are_measured() -> None:
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(2))
        stack.callback(one.kill)
        stack.callback(other.kill)
        busy = {"one": [one.pid], "other": [other.pid]}
        with standing_still(busy):
            assert stands_still(one.pid)
            assert stands_still(other.pid)
            with going(busy, "one"):
                assert eventually(lambda: not stands_still(one.pid))
                assert stands_still(other.pid)
            assert stands_still(one.pid)
            with going(busy, "of ours"):
                assert stands_still(one.pid)
            other.kill()
            other.wait()
            with going(busy, "other"):
                pass
        assert eventually(lambda: not stands_still(one.pid))
