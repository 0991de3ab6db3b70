"""Draws the Transfers document."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from kvctl.cli.numbers import clock, rate, size, span
from kvctl.views.table import column_table, state
from kvctl.views.transfers.document import Transfer, Transfers


def transfers_screen(body: Transfers, wide: bool) -> RenderableType:
    """One transfer a line, newest first; the cause stands there as soon as one is a miss."""
    causes = wide or any(transfer.cause for transfer in body.transfers)
    headers = ["STARTED", "REQUEST", "FROM", "TO", "STATE", "BYTES", "TIME", "RATE"]
    if wide:
        headers += ["SEQ", "TRANSFER", "BACKEND", "MODE", "TOKENS", "COPIES", "STAGES", "CHECKSUM", "CODE"]
    if causes:
        headers.append("CAUSE")
    rows: list[list[str | Text]] = []
    for transfer in body.transfers:
        row: list[str | Text] = [
            clock(transfer.started),
            transfer.request_id,
            transfer.remote_engine,
            f"{transfer.local_engine}/{transfer.local_rank}",
            state(transfer.state),
            size(transfer.bytes),
            span(transfer.seconds),
            rate(transfer.bytes_per_second),
        ]
        if wide:
            row += [
                str(transfer.seq),
                transfer.transfer_id,
                transfer.backend,
                transfer.mode,
                str(transfer.tokens),
                f"{transfer.coalesced_descriptors or '-'}/{transfer.descriptors}",
                stages(transfer),
                transfer.checksum.state or "-",
                transfer.code or "-",
            ]
        if causes:
            row.append(transfer.cause or "-")
        rows.append(row)
    return column_table(headers, rows, right="BYTES TIME RATE SEQ TOKENS COPIES")


def stages(transfer: Transfer) -> str:
    """``queued 1.20 ms, wire 8.00 ms``: the stages that took any time, in order."""
    return (
        ", ".join(f"{name} {span(seconds)}" for name, seconds in transfer.stages.items() if seconds > 0)
        or "-"
    )
