"""Long listings: sets of names, rows that are alike in one, rows picked by column. On a screen of 500 engines."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvctl.views.folded.names import name_set
from kvctl.views.folded.rows import MANY, folded, listing, settled
from kvctl.views.screen import Column, Foldable, TextTable, measure, names
from kvd.wire.frame import Message
from kvd.wire.query import EngineList, EngineRow, LeaseList, ListEngines, ListLeases, ListWorkers, WorkerList
from kvd.wire.transfer import ListTransfers, TransferList
from tests.kvctl.conftest import ENGINES, LEASES, WORKERS, ledger_row

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Outcome, Run


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([f"decode-{n}" for n in range(64)], "decode-{0..63}"),
        (["decode-7"], "decode-7"),
        (["decode-3", "decode-4"], "decode-{3,4}"),
        (["decode-9", "decode-0", "decode-1", "decode-2"], "decode-{0..2,9}"),
        ([f"10.0.{a}.{b}:7766" for a in (0, 1) for b in (1, 2, 3)], "10.0.{0,1}.{1..3}:7766"),
        # Only what is there: with two pairs of braces a name would be told of that there is not.
        (["tp0.pp0", "tp1.pp0", "tp1.pp1"], "tp0.pp0, tp1.pp{0,1}"),
        (["n07", "n08", "n09", "n10"], "n{07..10}"),
        (["n9", "n010"], "n{9,010}"),
        ([f"n{n * n}" for n in range(12)], "n{0,1,4,9,16,...,121}"),
        (["x", "y", "x"], "x, y"),
        (list("abcdefg"), "a, b, c, ..., g"),
        ([f"{'9' * 40}-{n}" for n in (1, 2)], f"{'9' * 40}-{{1,2}}"),
    ],
)
def test_names_that_differ_in_numbers_are_a_set(given: list[str], told: str) -> None:
    assert name_set(given) == told


def test_a_set_of_names_is_exactly_these_names() -> None:
    """What stands in braces, each with each, is what was given: seen for each subset of 3 by 3 names."""
    every = [f"a{x}-{y}" for x in range(3) for y in range(3)]
    for chosen in range(1, 1 << len(every)):
        given = [name for at, name in enumerate(every) if chosen >> at & 1]
        assert sorted(spelled(name_set(given))) == given


def spelled(text: str) -> list[str]:
    return [name for one in text.split(", ") for name in _braces(one)]


def _braces(text: str) -> list[str]:
    found = re.search(r"\{([^}]*)\}", text)
    if not found:
        return [text]
    values: list[int] = []
    for part in found[1].split(","):
        low, _, high = part.partition("..")
        values += range(int(low), int(high or low) + 1)
    return [
        one for value in values for one in _braces(text[: found.start()] + str(value) + text[found.end() :])
    ]


Item = tuple[str, str, float | None]
COLUMNS: tuple[Column[Item], ...] = (
    names("NAME", lambda one: one[0]),
    Column("STATE", lambda one: one[1]),
    measure("AGE", lambda one: "-" if one[2] is None else f"{one[2]:g}s", lambda one: one[2]),
)


def rows(*items: Item) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in folded(items, *COLUMNS).rows]


def test_rows_fold_that_differ_in_name_and_measures_alone() -> None:
    assert rows(("a-0", "up", 9.0), ("a-1", "up", 10.0), ("a-2", "down", 3.0), ("a-3", "up", None)) == [
        ["a-{0,1,3}", "x3", "up", "9s..10s"],
        ["a-2", "x1", "down", "3s"],
    ]
    assert rows(("a-0", "up", None), ("a-1", "up", None)) == [["a-{0,1}", "x2", "up", "-"]]


def test_patterns_stay_apart_and_names_without_one_stand_together() -> None:
    given = [(name, "up", 1.0) for name in ("a-0", "b-0", "x7f", "a-1", "b-1", "q")]
    assert [row[:2] for row in rows(*given)] == [["a-{0,1}", "x2"], ["b-{0,1}", "x2"], ["x7f, q", "x2"]]


def test_what_is_long_folds_by_itself_where_that_makes_it_shorter() -> None:
    alike: list[Item] = [(f"a-{n}", "up", 1.0) for n in range(MANY + 1)]
    unlike: list[Item] = [(f"a-{n}", f"s{n}", 1.0) for n in range(MANY + 1)]
    for items, by_itself, expected in ((alike, True, 1), (alike[1:], True, MANY), (alike, False, MANY + 1)):
        shown = settled(listing(items, *COLUMNS), always=False, by_itself=by_itself)
        table = shown[0] if isinstance(shown, list) else shown
        assert isinstance(table, TextTable)
        assert len(table.rows) == expected
    assert settled(listing(unlike, *COLUMNS), always=False, by_itself=True) == listing(unlike, *COLUMNS).whole
    assert not isinstance(settled(listing(alike, *COLUMNS), always=True, by_itself=False), list | Foldable)


# --- kvctl ---

DECODERS = 500


def engine(n: int) -> EngineRow:
    row = msgspec.structs.replace(
        ENGINES[0],
        engine=msgspec.structs.replace(ENGINES[0].engine, engine_id=f"decode-{n}"),
        since=ENGINES[0].since + n % 7,
        peers=(),
        card=None,
    )
    return (
        msgspec.structs.replace(row, state="partial", reason="1 of 2 workers is missing") if n == 77 else row
    )


@pytest.fixture
def many(daemon: FakeDaemon) -> FakeDaemon:
    """500 engines, each with two workers, a lease and a transfer."""
    engines = tuple(engine(n) for n in range(DECODERS))
    workers = tuple(
        msgspec.structs.replace(
            WORKERS[0],
            engine_id=f"decode-{n}",
            rank=rank,
            pid=4000 + 2 * n + rank.tp,
            heartbeat_age=0.1 + n / 1e4,
        )
        for n in range(DECODERS)
        for rank in ENGINES[0].ranks
    )
    leases = tuple(
        msgspec.structs.replace(LEASES.rows[0], request_id=f"cmpl-{n}-p", reader=f"decode-{n}")
        for n in range(DECODERS)
    )
    moved = tuple(ledger_row(n, local_engine=f"decode-{n}", bytes=n << 20) for n in range(DECODERS, 0, -1))

    def transfers(asked: Message) -> Message:
        assert isinstance(asked, ListTransfers)
        return TransferList(rows=moved[: asked.limit], total=len(moved))

    daemon.answers |= {
        ListEngines: lambda _: EngineList(rows=engines),
        ListWorkers: lambda _: WorkerList(rows=workers),
        ListLeases: lambda _: LeaseList(rows=leases, open=DECODERS, taken=DECODERS),
        ListTransfers: transfers,
    }
    return daemon


@pytest.fixture
def typed(run: Run, many: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """kvctl at a terminal of 80 columns, or in a pipe where ``pipe`` is given."""

    def typed(*words: str, pipe: bool = False) -> Outcome:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: not pipe)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm")
        return run("--color", "never", "--runtime-dir", many.directory, *words)

    return typed


@pytest.mark.parametrize("command", ["engines", "workers", "leases", "transfers -n 500"])
def test_hundreds_of_rows_are_a_few_at_80_columns(typed: Callable[..., Outcome], command: str) -> None:
    shown = typed(*command.split())
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert len(lines) <= 20, shown.out
    assert max(map(len, lines)) <= 80, shown.out
    assert re.search(r"\{0?1?\.\.\d+", shown.out)
    assert "rows in" in lines[-1]
    assert "-o wide" in lines[-1]


@pytest.mark.parametrize("command", ["engines", "workers", "leases", "transfers -n 500"])
def test_pipes_and_other_forms_have_every_row(typed: Callable[..., Outcome], command: str) -> None:
    words = command.split()
    assert len(typed(*words, pipe=True).out.splitlines()) > DECODERS
    assert len(typed(*words, "-o", "wide").out.splitlines()) > DECODERS
    assert len(typed(*words, "-o", "jsonl").out.splitlines()) >= DECODERS
    assert len(typed(*words, "-o", "folded", pipe=True).out.splitlines()) < 20


def test_the_one_that_is_not_as_the_others_stands_out(typed: Callable[..., Outcome]) -> None:
    lines = typed("engines").out.splitlines()
    (odd,) = [line for line in lines if line.split()[:1] == ["x1"]]
    assert "partial" in odd
    assert "  decode-77" in lines
    assert "  decode-{0..76,78..499}" in lines
    assert any(line.split()[:1] == ["x499"] for line in lines)


def test_rows_are_picked_by_any_column(typed: Callable[..., Outcome]) -> None:
    def found(*words: str) -> list[str]:
        return typed("engines", "-o", "name", *words).out.split()

    assert found("--filter", "state=partial") == ["decode-77"]
    assert found("--filter", "ENGINE=decode-1?", "--filter", "state=ready") == [
        f"decode-{n}" for n in range(10, 20)
    ]
    assert found("--sort", "engine")[:3] == ["decode-0", "decode-1", "decode-2"]
    assert found("--sort", "since")[-1] == "decode-496"  # the oldest first
    assert found("--sort", "newest")[0] == "decode-6"
    moved = json.loads(typed("transfers", "-n", "2", "--sort", "bytes", "-o", "json").out)["transfers"]
    assert [row["bytes"] >> 20 for row in moved] == [500, 499]
    moved = json.loads(typed("transfers", "--filter", "to=decode-3/*", "-o", "json").out)["transfers"]
    assert [row["local_engine"] for row in moved] == ["decode-3"]
    assert (
        '"counted": 1,' in typed("transfers", "--filter", "to=decode-3/*", "--by", "pair", "-o", "json").out
    )
    rows = json.loads(typed("leases", "--filter", "held-by=decode-9", "-o", "json").out)["leases"]
    assert [row["request_id"] for row in rows] == ["cmpl-9-p"]
    rows = json.loads(typed("workers", "--filter", "rank=tp1", "--sort", "pid", "-o", "json").out)["workers"]
    assert (len(rows), rows[0]["pid"]) == (DECODERS, 4999)


def test_what_matches_nothing_is_said(typed: Callable[..., Outcome]) -> None:
    for command, told in (
        ("engines", "none of the 500 engines that kvd knows is state=lost"),
        ("workers", "none of 1000 has state=lost"),
        ("leases", "no lease with state=lost is open"),
        ("transfers", "none of the first 500 transfers has state=lost"),
    ):
        assert told in typed(command, "--filter", "state=lost").err


def test_wrong_columns_are_named_with_those_that_there_are(typed: Callable[..., Outcome]) -> None:
    for words, told in (
        (("--filter", "sate=x"), "--filter: there is no column 'sate'; did you mean state"),
        (("--filter", "state"), "--filter: 'state' is not COLUMN=VALUE"),
        (("--sort", "enginge"), "--sort: there is no column 'enginge'; did you mean engine"),
        (("--filter", "host=a"), "--filter: there is no column 'host'"),
    ):
        for command in ("engines", "workers", "leases", "transfers"):
            refused = typed(command, *words)
            if command == "transfers" and words[-1] == "enginge":
                assert "there is no column 'enginge'" in refused.err
                continue
            assert (refused.code, told in refused.err) == (2, True), refused.err
    assert "columns are engine, model, role, state" in typed("engines", "--filter", "x=y").err
