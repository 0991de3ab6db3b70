"""Draws the Verification document."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvctl.cli.numbers import span
from kvctl.views.table import column_table
from kvctl.views.verification import Verification, VerifiedRun


def verification_screen(body: Verification, wide: bool) -> RenderableType:
    """One run a line, then the verdict; when wide, the request's id and the cause."""
    headers = ["PROMPT", "TOKENS", "RUN", "LOAD", "EQUALS", "DIFFERS AT", "RECOVERY"]
    headers += ["REQUEST", "CAUSE"] if wide else []
    rows = []
    for run in body.runs:
        recovery = span(run.recovery) if run.recovery is not None else "-"
        row = [str(run.prompt), str(run.prompt_tokens), run.run, run.load, ", ".join(run.equals) or "-"]
        row += [_difference(run), recovery]
        rows.append(row + ([run.request_id, run.cause or "-"] if wide else []))
    return Group(
        column_table(headers, rows, right="PROMPT TOKENS RECOVERY"),
        Text(""),
        *(Text(line) for line in _verdict(body)),
    )


def _difference(run: VerifiedRun) -> str:
    if run.differs_at is None:
        return "-"
    return f"token {run.differs_at}: {_token(run.got)} for {_token(run.expected)}"


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)


def _verdict(body: Verification) -> list[str]:
    forced = [run for run in body.runs if run.run != "reuse"]
    right = len(body.runs) - body.wrong
    lines = [f"{right} of {len(body.runs)} runs are as they should be"]
    if not forced:
        lines[0] += "; no miss was forced"
    if body.references_differ:
        lines.append(
            f"the references of {body.references_differ} of {body.prompts} prompts differ: the KV of two engines need"
            " not be the same to the last bit"
        )
    return lines
