"""`kvctl top` as one plain page: in a pipe, with --once, and as a document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import jsonschema
import msgspec
import pytest

from kvctl.views.registry import json_schema
from kvd.wire.frame import Message
from kvd.wire.query import GetStatus, ListLeases
from kvd.wire.reply import Refused
from kvd.wire.transfer import ListTransfers, TransferList
from tests.kvctl.conftest import SINCE, STATUS, FakeDaemon, Run, ledger_row

if TYPE_CHECKING:
    from kvctl.top.looking import Look


@pytest.fixture(autouse=True)
def at_the_time_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime.fromtimestamp(SINCE + 30, UTC))


def test_a_page_has_rates_engines_pairs_flights_misses_and_transfers(run: Run, daemon: FakeDaemon) -> None:
    outcome = run("top", "--socket", daemon.directory)
    assert (outcome.code, outcome.err) == (0, "")
    heading = "2.13 MiB/s  0.0 transfers/s  1 in flight  2 open leases  1 miss in 1m00s"
    assert outcome.out.splitlines()[1] == heading
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["decode-0", "decode", "ready", "2/2", "0", "2.13", "MiB/s", "0", "B/s", "1"] in rows
    assert ["prefill-1", "decode-0", "3", "1", "2.13", "MiB/s", "9.60", "ms", "9.60", "ms"] in rows
    assert ["250", "ms", "28.5", "s", "prefill-1", "decode-0", "cmpl-4-p"] in rows
    assert ["PEER_GONE", "1", "0", "peer", "went", "away"] in rows
    assert [row[-1] for row in rows if "decode-0/tp1" in row] == ["cmpl-3", "cmpl-2", "cmpl-1"]


def test_the_document_is_what_its_schema_says(run: Run, daemon: FakeDaemon) -> None:
    document = json.loads(run("top", "-o", "json", "--socket", daemon.directory).out)
    jsonschema.Draft202012Validator(json_schema("Top")).validate(document)
    assert (document["kind"], document["in_flight_total"], document["leases_open"]) == ("Top", 1, 2)


def test_what_kvd_refuses_is_said_and_the_rest_shown(run: Run, daemon: FakeDaemon) -> None:
    refused = Refused(code="KVD-LEDGER", message="the ledger is away")
    daemon.answers |= {ListTransfers: lambda _: refused, ListLeases: lambda _: refused}
    out = run("top", "--once", "--socket", daemon.directory).out
    assert "not answered: transfers: the ledger is away" in out
    assert "not answered: leases: the ledger is away" in out
    assert "decode-0" in out
    assert "2 in flight  2 open leases" in out, "as kvd's gauges say"


def test_without_kvd_a_page_is_an_error_as_of_any_command(run: Run) -> None:
    outcome = run("top", "--once", "--runtime-dir", "/nonexistent")
    assert (outcome.code, outcome.out) == (3, "")


def test_a_terminal_without_textual_is_told_what_to_install(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("kvctl.commands.top.find_spec", lambda _: None)
    outcome = run("top", "--socket", daemon.directory)
    assert (outcome.code, outcome.out) == (2, "")
    assert "pip install 'kvctl[top]', or kvctl top --once" in outcome.err


def looks(daemon: FakeDaemon) -> Iterator[Look]:
    """One look after the other."""
    from kvctl.cli.settings import Settings
    from kvctl.top.looking import look

    seen = None
    while True:
        seen = look(Settings(runtime_dir=str(daemon.directory)), seen)
        yield seen


def test_later_looks_ask_for_what_is_new_alone_and_rates_are_kvds_counters(daemon: FakeDaemon) -> None:
    rows = [ledger_row(1)]

    def transfers(message: Message) -> Message:
        assert isinstance(message, ListTransfers)
        return TransferList(
            rows=tuple(row for row in reversed(rows) if row.seq > message.after), total=len(rows)
        )

    def status(moved: int) -> Message:
        return msgspec.structs.replace(
            STATUS, counters={"transfers.done": moved, "transfers.bytes": moved << 20}
        )

    daemon.answers |= {ListTransfers: transfers, GetStatus: lambda _: status(1)}
    seen = looks(daemon)
    next(seen)
    rows.append(ledger_row(2))
    daemon.answers[GetStatus] = lambda _: status(2)
    second = next(seen)
    assert [m.after for m in daemon.asked if isinstance(m, ListTransfers)] == [0, 1]
    assert [transfer.seq for transfer in second.top.transfers] == [2, 1]
    passed = second.samples[-1].at - second.samples[0].at
    assert second.top.bytes_per_second == pytest.approx((1 << 20) / passed)
    assert second.top.transfers_per_second == pytest.approx(1 / passed)


def busy(daemon: FakeDaemon, newest: int) -> None:
    """A kvd that records 50 transfers of 64 MiB a second, and has recorded so many by now."""
    began = SINCE + 30 - newest / 50

    def transfers(message: Message) -> Message:
        assert isinstance(message, ListTransfers)
        first = max(message.after, newest - message.limit)
        rows = (ledger_row(seq, started=began + seq / 50) for seq in range(newest, first, -1))
        return TransferList(rows=tuple(rows), total=newest, more=first > message.after)

    daemon.answers[ListTransfers] = transfers


def test_rates_of_more_transfers_than_are_asked_for_are_those_of_the_time_that_they_took(
    daemon: FakeDaemon,
) -> None:
    busy(daemon, newest=3000)
    seen = looks(daemon)
    top = next(seen).top
    assert top.window == pytest.approx(500 / 50, abs=0.1)
    assert top.transfers_per_second == pytest.approx(50, rel=0.02)
    assert top.pairs[0].bytes_per_second == pytest.approx(50 * (64 << 20), rel=0.02)


def test_a_gap_between_two_looks_is_not_counted_as_time_without_transfers(daemon: FakeDaemon) -> None:
    busy(daemon, newest=400)
    seen = looks(daemon)
    assert next(seen).top.window == 60.0, "all that there are"
    busy(daemon, newest=6000)
    later = next(seen)
    assert later.top.not_answered == ()
    assert len(later.rows) == 2000
    assert later.top.window == pytest.approx(2000 / 50, abs=0.1)
    assert later.top.pairs[0].bytes_per_second == pytest.approx(50 * (64 << 20), rel=0.02)


def test_another_kvd_is_looked_at_anew(daemon: FakeDaemon) -> None:
    seen = looks(daemon)
    assert len(next(seen).rows) == 3
    daemon.answers |= {
        GetStatus: lambda _: msgspec.structs.replace(STATUS, generation="another"),
        ListTransfers: lambda _: TransferList(rows=(ledger_row(1),), total=1),
    }
    assert [row.seq for row in next(seen).rows] == [1]
