"""The screen and the document of a push: its own stages, no rate, no count of copies that only the prefiller has."""

from __future__ import annotations

import io

from rich.console import Console

from kvctl.views.transfers.document import Transfers, transfer_document, transfers_screen
from kvd.wire.transfer import LedgerRow, TransferRecord

RECORD = TransferRecord(
    transfer_id="r@tp0",
    request_id="r",
    local_engine="d",
    local_rank="tp0",
    remote_engine="p",
    remote_generation="g",
    remote_request_id="x",
    backend="nixl",
    mode="push",
    state="done",
    tokens=1000,
    bytes=1 << 20,
    descriptors=128,
    stages={"queued": 0.0, "handshake": 0.002, "announce": 0.001, "wait": 0.2, "wire": 0.05},
)


def test_a_push_has_no_rate_since_it_runs_beside_the_computing() -> None:
    document = transfer_document(LedgerRow(1, RECORD))
    assert (document.mode, document.bytes_per_second) == ("push", None)
    assert document.seconds == sum(RECORD.stages.values())


def test_the_screen_names_the_stages_of_a_push() -> None:
    out = io.StringIO()
    body = Transfers(total=1, transfers=(transfer_document(LedgerRow(1, RECORD)),))
    Console(file=out, width=400).print(transfers_screen(body, wide=True))
    screen = out.getvalue()
    assert "announce 1.00 ms, wait 200 ms, wire 50.0 ms" in screen
    assert "-/128" in screen
