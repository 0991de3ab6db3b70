"""Looking at transfers: filters that reach kvd, one transfer whole, groups, and what slow finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvctl.views.slow import slow_document
from kvctl.views.transfers.document import TransferDocument, transfer_document
from kvctl.views.transfers.whole import placed, timeline
from kvd.wire.transfer import ChecksumResult, LedgerRow, ListTransfers, TransferList
from tests.kvctl.conftest import ledger_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvctl.ledger.slow_findings import SlowFinding
    from kvd.wire.frame import Message
    from tests.kvctl.conftest import FakeDaemon, Run


def test_every_filter_reaches_kvd(run: Run, daemon: FakeDaemon) -> None:
    run(
        "transfers", "--engine", "d", "--peer", "p", "--backend", "nixl", "--since", "10m", "--slower-than", "5ms",
        "--code", "PROMPT_MISMATCH", "--sort", "slowest", "--last", "7", "--socket", daemon.directory,
    )  # fmt: skip
    assert daemon.asked[-1] == ListTransfers(
        limit=7,
        engine_id="d",
        peer="p",
        backend="nixl",
        within=600.0,
        slower_than=0.005,
        order="slowest",
        code="PROMPT_MISMATCH",
    )


def test_a_code_that_there_is_not_is_refused_with_those_that_there_are(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("transfers", "--code", "PROMPT_MISSMATCH", "--socket", daemon.directory)
    assert outcome.code == 2
    assert "'PROMPT_MISSMATCH' is not one of PROMPT_MISMATCH, " in outcome.err
    assert "did you mean PROMPT_MISMATCH" in outcome.err


def test_misses_are_counted_by_code(run: Run, daemon: FakeDaemon) -> None:
    groups = json.loads(run("transfers", "--by", "code", "-o", "json", "--socket", daemon.directory).out)
    assert [(g["key"], g["transfers"]) for g in groups["groups"]] == [("done", 2), ("PEER_GONE", 1)]


def test_a_miss_that_the_scheduler_alone_knows_is_shown_like_any_other(run: Run, daemon: FakeDaemon) -> None:
    row = ledger_row(
        7, state="miss", cause="another prompt", code="PROMPT_MISMATCH", local_rank="scheduler", backend="nixl",
        bytes=0, remote_ranks=(), groups=(), stages={"handshake": 0.0}, moments={"reported": 0.0}, attempts=0,
        descriptors=0, coalesced_descriptors=0, local_blocks=(), remote_blocks=(),
    )  # fmt: skip
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(row,), total=1)
    body = json.loads(run("transfer", "cmpl-7", "-o", "json", "--socket", daemon.directory).out)
    assert (body["state"], body["code"], body["parts"][0]["local_rank"]) == (
        "miss",
        "PROMPT_MISMATCH",
        "scheduler",
    )
    shown = run("transfer", "cmpl-7", "--socket", daemon.directory).out
    assert "PROMPT_MISMATCH: another prompt" in shown
    assert "decode-0/scheduler" in run("transfers", "--socket", daemon.directory).out


def test_many_rows_are_asked_for_page_by_page(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl.ledger.rows.PAGE", 2)
    groups = json.loads(run("transfers", "--by", "peer", "-o", "json", "--socket", daemon.directory).out)
    asked = [m for m in daemon.asked if isinstance(m, ListTransfers)]
    assert [(m.limit, m.before) for m in asked] == [(2, 0), (2, 2)]
    assert (groups["counted"], groups["more"]) == (3, False)
    [group] = groups["groups"]
    assert (group["key"], group["transfers"], group["misses"]) == ("prefill-1", 3, 1)


@pytest.mark.parametrize("which", ["cmpl-2", "t-2", "2"])
def test_a_transfer_is_found_by_each_of_its_names(run: Run, daemon: FakeDaemon, which: str) -> None:
    body = json.loads(run("transfer", which, "-o", "json", "--socket", daemon.directory).out)
    assert (body["request_id"], body["state"], len(body["parts"])) == ("cmpl-2", "done", 1)
    [part] = body["parts"]
    assert part["local_blocks"] == [{"group": 0, "first": 0, "runs": [[1, 2], [0, 1]]}]


def test_an_id_that_nothing_is_known_of_is_2_and_says_so(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("transfer", "cmpl-77", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (2, "")
    assert "no transfer 'cmpl-77' in the ledger" in outcome.err


@pytest.mark.parametrize("command", ["transfers", "slow", "trace export /dev/null"])
def test_an_engine_that_nobody_knows_is_2_and_says_which_was_meant(
    run: Run, daemon: FakeDaemon, command: str
) -> None:
    of_all = daemon.answers[ListTransfers]

    def answer(asked: Message) -> Message | None:
        assert isinstance(asked, ListTransfers)
        return TransferList(rows=(), total=3) if asked.engine_id else of_all(asked)

    daemon.answers[ListTransfers] = answer
    outcome = run(*command.split(), "--engine", "decod-0", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (2, "")
    assert "no engine 'decod-0'; did you mean decode-0" in outcome.err
    idle = run(*command.split(), "--engine", "prefill-0", "--socket", daemon.directory)
    assert "no engine" not in idle.err, "kvd knows it, and it has no transfer yet"


def test_all_workers_of_the_newest_attempt_are_its_parts(run: Run, daemon: FakeDaemon) -> None:
    def part(seq: int, **changes: object) -> LedgerRow:
        return ledger_row(seq, request_id="r", remote_request_id="x", **changes)

    rows = (
        part(9, local_rank="tp1", state="miss", cause="gone"),
        part(8, local_rank="tp0"),
        part(7, local_rank="tp10"),
        part(3, local_rank="tp0", local_generation="older"),
    )

    def answer(message: Message) -> Message:
        assert isinstance(message, ListTransfers)
        return TransferList(rows=rows[: message.limit], total=4)

    daemon.answers[ListTransfers] = answer
    body = json.loads(run("transfer", "r", "-o", "json", "--socket", daemon.directory).out)
    assert [part["local_rank"] for part in body["parts"]] == ["tp0", "tp1", "tp10"]
    assert (body["state"], body["cause"], body["bytes"]) == ("miss", "gone", 3 * (64 << 20))


def stages_of(**changes: object) -> list[tuple[str, float, float]]:
    part: TransferDocument = transfer_document(ledger_row(1, **changes))
    return [(name, round(begin, 6), length) for name, begin, length in placed(part)]


def test_stages_are_drawn_where_the_clock_says_they_were() -> None:
    stages = {"queued": 0.001, "handshake": 0.1, "plan": 0.002, "post": 0.003, "wire": 0.004}
    moments = {"queued": -0.001, "planned": 0.012, "posting": 0.02, "posted": 0.023, "last": 0.027}
    assert stages_of(stages=stages, moments=moments) == [
        ("handshake", -0.101, 0.1),
        ("queued", -0.001, 0.001),
        ("plan", 0.01, 0.002),
        ("post", 0.02, 0.003),
        ("wire", 0.023, 0.004),
    ]
    assert stages_of(stages=stages, moments={"handshake": 0.1, "queued": -0.001})[1] == (
        "handshake",
        0.0,
        0.1,
    )


def test_stages_without_moments_follow_each_other() -> None:
    assert stages_of(stages={"queued": 1.0, "plan": 0.5, "wire": 2.0}, moments={}) == [
        ("queued", -1.0, 1.0),
        ("plan", 0.0, 0.5),
        ("wire", 0.5, 2.0),
    ]


def test_a_push_is_drawn_with_its_own_stages() -> None:
    moments = {"queued": 0.0, "announced": 0.1, "taken": 0.2, "first": 0.5, "last": 0.6}
    stages = {"queued": 0.0, "handshake": 0.0, "announce": 0.1, "wait": 0.3, "wire": 0.1}
    assert stages_of(mode="push", stages=stages, moments=moments) == [
        ("announce", 0.1, 0.1),
        ("wait", 0.2, 0.3),
        ("wire", 0.5, 0.1),
    ]


def test_the_wide_screen_lists_blocks_as_runs(run: Run, daemon: FakeDaemon) -> None:
    screen = run("transfer", "cmpl-2", "-o", "wide", "--socket", daemon.directory).out
    assert "tp1   local   g0         0  1-2 0\n" in screen
    assert "tp1   remote  g0         0  1-3\n" in screen


def findings(rows: Sequence[LedgerRow]) -> dict[str, SlowFinding]:
    return {f.code: f for f in slow_document(TransferList(rows=tuple(rows), total=len(rows))).findings}


def rows_of(count: int = 20, /, **changes: Any) -> list[LedgerRow]:
    return [ledger_row(seq, **changes) for seq in range(count)]


MANY: dict[str, Any] = {"coalesced_descriptors": 4000, "descriptors": 8000}
FEW: dict[str, Any] = {"coalesced_descriptors": 4, "descriptors": 8000}
BY_STAGE: dict[str, dict[str, Any]] = {
    "DESCRIPTOR_STORM": {"stages": {"post": 0.02, "wire": 0.01}, **MANY},
    "COPIES_WHILE_POSTING": {"stages": {"post": 0.02, "wire": 0.01}, **FEW},
    "HELD_UP": {"stages": {"post": 3.6, "wire": 0.02}, "bytes": 1 << 20, **FEW},
    "HANDSHAKE_ON_PATH": {"stages": {"handshake": 0.5, "wire": 0.1}},
    "QUEUE_WAIT": {"stages": {"queued": 0.5, "wire": 0.1}},
    "CLAIM_WAIT": {"stages": {"wire": 0.1, "claim": 0.5}},
    "PLAN_COST": {"stages": {"plan": 0.5, "wire": 0.1}},
    "BETWEEN_STAGES": {"stages": {"wire": 0.1, "other": 0.5}},
    "WAITS_FOR_PREFILL": {"stages": {"wait": 0.5, "wire": 0.1}, "mode": "push"},
    "RETRIES": {"attempts": 2},
    "MISSES": {"state": "miss", "cause": "peer went away"},
}


@pytest.mark.parametrize("code", BY_STAGE)
def test_what_dominates_is_found(code: str) -> None:
    assert set(findings(rows_of(**BY_STAGE[code]))) == {code}


def test_what_is_as_it_should_be_gives_no_finding() -> None:
    assert findings(rows_of()) == {}
    assert findings(rows_of(stages={"queued": 0.0003, "post": 0.0001}, moments={})) == {}, (
        "too short to be worth a word"
    )


def test_posts_are_held_up_where_they_take_long_and_move_nothing() -> None:
    post = {"post": 0.5, "wire": 0.01}
    assert set(findings(rows_of(stages=post, bytes=1 << 30, **FEW))) == {"COPIES_WHILE_POSTING"}
    assert set(findings(rows_of(stages=post, bytes=1 << 20, **MANY))) == {"DESCRIPTOR_STORM"}
    held_up = rows_of(1, stages=post, bytes=1 << 20, **FEW)
    assert "500 ms at worst for 4 copies" in findings([*rows_of(), *held_up])["HELD_UP"].message
    assert findings([*rows_of(200), *held_up]) == {}, "once in a while is nothing to report"


def test_many_copies_on_the_wire_are_a_hint_not_a_warning() -> None:
    found = findings(rows_of(stages={"post": 0.001, "wire": 0.05}, **MANY))
    assert found["DESCRIPTOR_STORM"].severity == "info"


def test_a_slow_path_is_one_that_others_of_its_backend_are_not_on() -> None:
    slow = rows_of(remote_engine="far", stages={"wire": 0.1})
    fast = rows_of(stages={"wire": 0.01})
    assert set(findings([*slow, *fast])) == {"SLOW_PATH"}
    assert "far to decode-0" in findings([*slow, *fast])["SLOW_PATH"].pair
    assert findings(slow) == {}
    other = [
        msgspec.structs.replace(r, record=msgspec.structs.replace(r.record, backend="direct")) for r in fast
    ]
    assert findings([*slow, *other]) == {}


def test_a_long_tail_is_found_unless_its_transfers_are_larger() -> None:
    late: dict[str, Any] = {"stages": {"queued": 2.2, "wire": 0.1}, "moments": {}}
    usual = rows_of(60, stages={"wire": 0.02}, moments={})
    found = findings([*usual, *rows_of(2, **late)])["LONG_TAIL"]
    assert found.message == (
        "one in a hundred takes 2.30 s or more, the middle one 20.0 ms, of as many bytes; 96% of the time of 2 such"
        " is in queued"
    )
    assert "LONG_TAIL" not in findings([*usual, *rows_of(2, **late, bytes=64 * (64 << 20))])
    assert "LONG_TAIL" not in findings([*usual, *usual, *usual, *usual, *rows_of(1, **late)]), (
        "once in a while"
    )


def test_a_rank_that_all_others_wait_for_is_named() -> None:
    rows = [*rows_of(local_rank="tp0"), *rows_of(local_rank="tp1", stages={"wire": 0.1})]
    assert "tp1 takes 100 ms" in findings(rows)["STRAGGLER"].message
    assert findings([*rows_of(local_rank="tp0"), *rows_of(3, local_rank="tp1", stages={"wire": 0.1})]) == {}


def test_shares_are_of_the_time_of_all_transfers_together() -> None:
    rows = [ledger_row(1, stages={"wire": 9.0}), ledger_row(2, stages={"queued": 1.0, "wire": 0.0})]
    [pair] = slow_document(TransferList(rows=tuple(rows), total=2)).pairs
    assert {stage.stage: stage.share for stage in pair.stages} == {"wire": 0.9, "queued": 0.1}
    assert pair.dominant == "wire"


def test_a_read_of_a_prefix_is_told_by_its_mode(run: Run, daemon: FakeDaemon) -> None:
    row = ledger_row(1, prefix=True)
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(row,), total=1)
    assert "  pull, prefix  " in run("transfers", "-o", "wide", "--socket", daemon.directory).out
    assert run("slow", "--socket", daemon.directory).out.startswith("1 transfer from ")


def test_slow_without_transfers_says_so(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=7)
    outcome = run("slow", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (0, "none of 7 transfers matches\n")


def test_an_answer_without_transfers_says_what_was_looked_for_and_what_else_to_look_for(
    run: Run, daemon: FakeDaemon
) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=3)
    outcome = run(
        "transfers",
        "--engine",
        "decode-0",
        "--code",
        "PEER_GONE",
        "--since",
        "10m",
        "--socket",
        daemon.directory,
    )
    assert outcome.err.startswith(
        "kvctl: none of the 3 transfers in the ledger matches --engine decode-0 --code PEER_GONE --since 10m; leave"
        " out one"
    )
    by_request = run("transfers", "--request", "cmpl-2", "--socket", daemon.directory).err
    assert "vLLM adds to ids: --filter 'request=cmpl-2*' finds those that begin so" in by_request
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=0)
    told = run("transfers", "--socket", daemon.directory).err
    assert told.startswith("kvctl: the ledger holds no transfer yet; ")
    assert "what a prefiller here gave is in the ledger of the decoder's host; kvctl doctor" in told


def test_a_backend_that_there_is_not_is_named_where_none_matches(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=3)
    told = run("transfers", "--backend", "nixel", "--socket", daemon.directory)
    assert "there is no backend 'nixel', did you mean nixl?" in told.err


def test_a_transfers_time_is_one_in_every_command_with_what_lies_between_its_stages(
    run: Run, daemon: FakeDaemon
) -> None:
    row = ledger_row(
        2, stages={"queued": 0.002, "handshake": 0.04, "plan": 0.001, "wire": 0.03},
        moments={"queued": -0.002, "handshake": 0.04, "planned": 0.2, "posted": 0.265, "last": 0.295},
    )  # fmt: skip
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(row,), total=1)

    def seen(*command: str) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(run(*command, "-o", "json", "--socket", daemon.directory).out)
        return body

    assert seen("transfer", "cmpl-2")["seconds"] == pytest.approx(0.297)
    assert seen("transfers")["transfers"][0]["seconds"] == pytest.approx(0.297)
    assert seen("transfers", "--by", "peer")["groups"][0]["seconds_p50"] == pytest.approx(0.297)
    assert seen("slow")["pairs"][0]["seconds_p99"] == pytest.approx(0.297)


def test_transfers_are_found_by_what_came_of_their_checksums(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ("ok", "differs", "", "unknown", "differs", "ok")
    sums = [ChecksumResult(state=state) for state in states]  # type: ignore[arg-type]
    ledger = [ledger_row(n, bytes=n, checksum=found) for n, found in enumerate(sums, 1)][::-1]

    def page(message: Message) -> Message:
        assert isinstance(message, ListTransfers)
        found = [row for row in ledger if not message.before or row.seq < message.before]
        return TransferList(rows=tuple(found[: message.limit]), total=6, more=len(found) > message.limit)

    daemon.answers[ListTransfers] = page
    monkeypatch.setattr("kvctl.ledger.rows.PAGE", 2)

    def found(*options: str) -> list[int]:
        out = run("transfers", *options, "-o", "jsonl", "--socket", daemon.directory).out
        return [json.loads(line)["seq"] for line in out.splitlines()]

    assert found("--checksum", "differs") == [5, 2]
    assert found("--checksum", "ok", "--last", "1") == [6]
    assert found("--checksum", "ok", "--sort", "largest") == [6, 1]
    assert "did you mean differs?" in run("transfers", "--checksum", "difers").err


def test_the_code_of_a_miss_stands_beside_its_cause(run: Run, daemon: FakeDaemon) -> None:
    first, missed, *_ = run("transfers", "--socket", daemon.directory).out.splitlines()
    assert first.split()[-2:] == ["CODE", "CAUSE"]
    assert missed.endswith("PEER_GONE  peer went away")


def test_slow_names_a_code_without_a_cause_alone() -> None:
    rows = tuple(ledger_row(n, state="miss", cause="", code="PROMPT_MISMATCH") for n in range(5))
    [found] = [f for f in slow_document(TransferList(rows=rows, total=5)).findings if f.code == "MISSES"]
    assert found.message == "5 of 5 were misses, 5 of them: PROMPT_MISMATCH"


@pytest.mark.parametrize("width", [50, 60, 80, 160])
def test_the_bars_of_a_transfer_fit_the_terminal(width: int) -> None:
    part = transfer_document(ledger_row(1, local_rank="tp1.pp2", stages={"handshake": 0.004, "wire": 0.008}))
    bars = timeline((part,), width)
    assert isinstance(bars, list)
    lines = ["".join(piece if isinstance(piece, str) else piece.text for piece in line) for line in bars]
    assert len(lines) == 3
    assert max(map(len, lines)) <= width


def test_the_tail_of_the_recorded_example_is_found(run: Run) -> None:
    trace = Path(__file__).parents[3] / "examples" / "traces" / "gdn-tp1-to-tp2.jsonl.gz"
    body = json.loads(run("slow", "--from", trace, "-o", "json").out)
    assert body["pairs"][0]["seconds_p99"] > 2
    assert {"LONG_TAIL", "HELD_UP"} & {found["code"] for found in body["findings"]}
