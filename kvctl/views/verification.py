"""The Verification document: what `kvctl verify` prints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import span
from kvctl.cli.units import Count, Seconds
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, number, table

Run = Literal["reuse", "before", "flight", "layers"]
Reference = Literal["reuse", "recompute"]


class VerifiedRun(Struct, frozen=True, kw_only=True):
    """One answer, held against the references.

    ``run`` says how it came about: with the prefiller's KV (the reference `reuse` itself), or with a miss forced at
    that moment. The reference `recompute` is what the decoder answers all by itself.
    """

    prompt: Annotated[int, Meta(ge=0, description="number of the prompt")]
    prompt_tokens: Count
    run: Run
    request_id: str
    equals: Annotated[tuple[Reference, ...], Meta(description="references that it equals token for token")]
    differs_at: Annotated[
        Count | None,
        Meta(description="first token that differs from the nearer reference; null where it equals"),
    ]
    expected: Annotated[int | None, Meta(description="that token in the reference; null behind its end")]
    got: Annotated[int | None, Meta(description="that token here; null behind the end")]
    load: Annotated[
        Literal["done", "missed", "recovered", "not seen"],
        Meta(description="what became of the load: as kvd's ledger or the order has it"),
    ]
    recovery: Annotated[
        Seconds | None, Meta(description="from the forced miss to the first token; null without a miss")
    ]
    cause: str


class Verification(Struct, frozen=True, kw_only=True):
    """Answers with KV from elsewhere, without it, and with misses on the way."""

    endpoint: str
    prefill: Annotated[str, Meta(description="empty where a router was asked")]
    router: str
    model: str
    engine_id: Annotated[str, Meta(description="the engine whose loads were made to miss")]
    prompts: Count
    max_tokens: Count
    references_differ: Annotated[
        Count,
        Meta(description="prompts whose two references differ; that may be right, see docs/recovery.md"),
    ]
    wrong: Annotated[
        Count, Meta(description="runs that equal no reference, or whose load was not what it should be")
    ]
    runs: tuple[VerifiedRun, ...]


def first_difference(
    tokens: Sequence[int], reference: Sequence[int]
) -> tuple[int, int | None, int | None] | None:
    """(position, expected, got) of the first token that differs from a reference; None where none does."""
    both = enumerate(zip_longest(reference, tokens))
    return next(((at, expected, got) for at, (expected, got) in both if expected != got), None)


def verification_screen(body: Verification, wide: bool) -> ScreenPart:
    """One run a line, then the verdict; when wide, the request's id and the cause."""
    runs = table(
        body.runs,
        number("PROMPT", lambda run: run.prompt),
        number("TOKENS", lambda run: run.prompt_tokens),
        Column("RUN", lambda run: run.run),
        Column("LOAD", lambda run: run.load),
        Column("EQUALS", lambda run: ", ".join(run.equals) or "-"),
        Column("DIFFERS AT", _difference),
        number("RECOVERY", lambda run: None if run.recovery is None else span(run.recovery)),
        Column("REQUEST", lambda run: run.request_id, wide),
        Column("CAUSE", lambda run: run.cause or "-", wide),
    )
    return [runs, "", *_result(body)]


def _difference(run: VerifiedRun) -> str:
    if run.differs_at is None:
        return "-"
    return f"token {run.differs_at}: {_token(run.got)} for {_token(run.expected)}"


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)


def _result(body: Verification) -> list[str]:
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


VIEWS = (View(Verification, verification_screen, "runs", VerifiedRun),)
