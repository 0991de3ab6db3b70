"""What kvctl and kvd's metrics say of checksums."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from kvd.service.metrics import render
from kvd.wire.identity import Endpoint
from kvd.wire.query import KvdStatus
from kvd.wire.transfer import ChecksumResult, GroupChecksum, ListTransfers, TransferList
from tests.kvctl.conftest import ledger_row

if TYPE_CHECKING:
    import pytest

    from kvd.wire.frame import Message
    from tests.kvctl.conftest import FakeDaemon, Run

DIFFERS = "layer l1 v head 1: 0x00000000000000ab there, 0x00000000000000cd here"
ROWS = (
    ledger_row(
        4,
        request_id="r",
        remote_request_id="x",
        state="miss",
        cause=f"checksums differ from the prefiller's: group 0 {DIFFERS}",
        checksum=ChecksumResult(
            state="differs",
            groups=(GroupChecksum(0, 2, DIFFERS), GroupChecksum(1, 3)),
            seconds=0.012,
        ),
    ),
    ledger_row(
        3,
        request_id="r",
        remote_request_id="x",
        local_rank="tp0",
        checksum=ChecksumResult(state="unknown", why="kvd is away"),
    ),
)


def given(daemon: FakeDaemon) -> None:
    def answer(message: Message) -> Message:
        assert isinstance(message, ListTransfers)
        return TransferList(rows=ROWS[: message.limit], total=2)

    daemon.answers[ListTransfers] = answer


def test_a_transfer_shows_what_was_compared(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    given(daemon)
    lines = [" ".join(x.split()) for x in run("transfer", "r", "--socket", daemon.directory).out.splitlines()]
    assert "RANK CHECKSUM GROUP LAYERS TIME WHAT" in lines
    assert f"tp1 differs g0 2 12.0 ms {DIFFERS}" in lines
    assert "tp1 ok g1 3 12.0 ms -" in lines
    assert any(line.startswith("tp0 unknown - -") and line.endswith("kvd is away") for line in lines)


def test_the_wide_list_has_a_column_of_it_and_json_has_all(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    given(daemon)
    header, first, second = run("transfers", "-o", "wide", "--socket", daemon.directory).out.splitlines()[:3]
    assert "CHECKSUM" in header
    assert "differs" in first
    assert "unknown" in second
    body = json.loads(run("transfers", "-o", "json", "--socket", daemon.directory).out)
    assert body["transfers"][0]["checksum"] == {
        "state": "differs",
        "why": "",
        "seconds": 0.012,
        "groups": [{"group": 0, "layers": 2, "differs": DIFFERS}, {"group": 1, "layers": 3, "differs": ""}],
    }


def test_metrics_count_them_by_result() -> None:
    status = KvdStatus(
        kvd_id="k",
        generation="g",
        version="1",
        pid=1,
        host="h",
        started=time.time(),
        runtime_dir="/run/kvd",
        endpoint=Endpoint(),
        counters={"checksums.ok": 5, "checksums.differs": 1, "transfers.done": 7},
        gauges={},
    )
    lines = render(status).splitlines()
    assert lines[:3] == [
        "# TYPE kvd_checksums_total counter",
        'kvd_checksums_total{result="differs"} 1',
        'kvd_checksums_total{result="ok"} 5',
    ]
    assert lines.count("# TYPE kvd_checksums_total counter") == 1
