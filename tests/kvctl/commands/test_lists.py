"""Long lists are asked for page by page, and what kvd does not show to this user is said."""

from __future__ import annotations

import json

import msgspec

from kvd.wire.frame import Message
from kvd.wire.outcomes import GetOutcomes, Outcomes
from kvd.wire.query import EngineList, ListEngines, ListWorkers, WorkerList
from kvd.wire.transfer import ListTransfers, TransferList
from tests.kvctl.conftest import ENGINES, SERVED, WORKERS, FakeDaemon, Run, ledger_row


def test_engines_workers_and_outcomes_are_asked_for_until_there_are_no_more(
    run: Run, daemon: FakeDaemon
) -> None:
    def one(rows: tuple[object, ...], after: str) -> tuple[tuple[object, ...], str]:
        at = int(after or 0)
        return rows[at : at + 1], str(at + 1) if at + 1 < len(rows) else ""

    def engines(message: Message) -> Message:
        assert isinstance(message, ListEngines)
        rows, more = one(ENGINES, message.after)
        return EngineList(rows=rows, more=more)  # type: ignore[arg-type]

    def workers(message: Message) -> Message:
        assert isinstance(message, ListWorkers)
        rows, more = one(WORKERS, message.after)
        return WorkerList(rows=rows, more=more)  # type: ignore[arg-type]

    def served(message: Message) -> Message:
        assert isinstance(message, GetOutcomes)
        rows, more = one(SERVED, message.after)
        return Outcomes(rows=rows, more=more)  # type: ignore[arg-type]

    whole = [
        run(command, "-o", "json", "--socket", daemon.directory).out for command in ("engines", "workers")
    ]
    daemon.answers |= {ListEngines: engines, ListWorkers: workers, GetOutcomes: served}
    for command, before in zip(("engines", "workers"), whole, strict=True):
        paged = json.loads(run(command, "-o", "json", "--socket", daemon.directory).out)
        assert [row["engine_id"] for row in paged[command]] == [
            row["engine_id"] for row in json.loads(before)[command]
        ]


def test_what_is_hidden_is_said(run: Run, daemon: FakeDaemon) -> None:
    hidden = tuple(msgspec.structs.replace(row, hidden=True) for row in ENGINES[:2])
    daemon.answers[ListEngines] = lambda _: EngineList(rows=hidden + ENGINES[2:])
    outcome = run("engines", "--socket", daemon.directory)
    assert outcome.err.startswith(
        "kvctl: 2 engines of other users with their names and states alone: kvd's setting"
    )
    rows = tuple(msgspec.structs.replace(row, hidden=True) for row in WORKERS)
    daemon.answers[ListWorkers] = lambda _: WorkerList(rows=rows)
    assert (
        f"kvctl: {len(WORKERS)} workers and schedulers of other"
        in run("workers", "--socket", daemon.directory).err
    )


def test_transfers_that_are_hidden_are_counted(run: Run, daemon: FakeDaemon) -> None:
    for rows in ((), (ledger_row(1),)):
        daemon.answers[ListTransfers] = lambda _, rows=rows: TransferList(rows=rows, total=5, hidden=3)  # type: ignore[misc]
        for command in ("transfers", "slow"):
            outcome = run(command, "--socket", daemon.directory)
            assert outcome.code == 0
            assert outcome.err == (
                "kvctl: 3 transfers of other users' engines are not shown: kvd's setting access.read is own; root,"
                " the user of kvd and members of its orders.group see all\n"
            )


def test_what_is_not_found_among_what_may_be_seen_is_said_of_that_alone(run: Run, daemon: FakeDaemon) -> None:
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=(), total=5, hidden=3)
    filtered = run("transfers", "--state", "miss", "--socket", daemon.directory)
    assert "none of those of your own engines matches --state miss" in filtered.err
    assert "none of the 5" not in filtered.err
    one = run("transfer", "r-1", "--socket", daemon.directory)
    assert (one.code, "no transfer 'r-1' of your own engines" in one.err) == (2, True)
    trace = run("trace", "export", "/dev/null", "--socket", daemon.directory)
    assert (trace.code, "3 transfers of other users' engines are not shown" in trace.err) == (1, True)


def test_workers_of_an_engine_that_is_not_there_are_2_with_near_misses(run: Run, daemon: FakeDaemon) -> None:
    unknown = run("workers", "--engine", "decode-1", "--socket", daemon.directory)
    assert (unknown.code, unknown.out) == (2, "")
    assert "kvd knows no engine 'decode-1'; did you mean decode-0" in unknown.err
    away = run("workers", "--engine", "prefill-1", "--socket", daemon.directory)
    assert (
        away.code,
        "prefill-1 has no worker here: it is an engine of the kvd at 10.0.0.8:7766" in away.err,
    ) == (0, True)


def test_empty_lists_say_so(run: Run, daemon: FakeDaemon) -> None:
    none = run("engines", "--state", "gone", "--local", "-o", "jsonl", "--socket", daemon.directory)
    assert (none.code, none.out) == (0, "")
    assert none.err == "kvctl: none of the 3 engines that kvd knows is gone and local\n"
    daemon.answers |= {
        ListEngines: lambda _: EngineList(rows=()), ListWorkers: lambda _: WorkerList(rows=()),
    }  # fmt: skip
    for command, what in (("engines", "kvd knows no engine"), ("workers", "no worker is registered")):
        assert run(command, "--socket", daemon.directory).err.startswith(f"kvctl: {what}")
