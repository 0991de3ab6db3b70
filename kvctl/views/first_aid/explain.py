"""The Codes and the Explanations documents: what `kvctl explain` prints without a code, and with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.explained.entries import CodeText, Kind, entries
from kvctl.views.registry import View
from kvctl.views.screen import Column, Indented, ScreenPart, Styled, spaced, table


class CodeName(Struct, frozen=True, kw_only=True):
    """One code in a line."""

    code: Annotated[str, Meta(description="stable")]
    shown_by: Annotated[str, Meta(description="who shows it: a command, or an error")]
    summary: str


class Codes(Struct, frozen=True, kw_only=True):
    """Every code that can be explained."""

    codes: tuple[CodeName, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """What is behind a code."""

    code: Annotated[str, Meta(description="stable")]
    shown_by: Annotated[str, Meta(description="who shows it: a command, or an error")]
    summary: str
    cause: Annotated[str, Meta(description="why it comes about")]
    evidence: Annotated[str, Meta(description="what shows that it is so; a dash where nothing needs to")]
    next: Annotated[str, Meta(description="what to do")]
    provoked_by: Annotated[
        str, Meta(description="the test that brings it about; empty for the code of a family of errors")
    ]


class Explanations(Struct, frozen=True, kw_only=True):
    """All that one code stands for: one that a load misses with may be a finding too."""

    explanations: tuple[Explanation, ...]


def codes_document() -> Codes:
    """All codes, kind by kind."""
    return Codes(
        codes=tuple(
            CodeName(code=code, shown_by=kind.shown_by, summary=text.says) for kind, code, text in entries()
        )
    )


def explanations_document(wanted: str) -> Explanations:
    """What is said of one code."""
    return Explanations(explanations=tuple(_explanation(*entry) for entry in entries() if entry[1] == wanted))


def _explanation(kind: Kind, code: str, text: CodeText) -> Explanation:
    return Explanation(
        code=code,
        shown_by=kind.shown_by,
        summary=text.says,
        cause=text.cause,
        evidence=text.evidence,
        next=text.next,
        provoked_by=text.test,
    )


def codes_screen(body: Codes, wide: bool) -> ScreenPart:
    """One code a line."""
    del wide
    return table(
        body.codes,
        Column("CODE", lambda one: one.code),
        Column("SHOWN BY", lambda one: one.shown_by),
        Column("SUMMARY", lambda one: one.summary),
    )


PARTS: tuple[tuple[str, Callable[[Explanation], str]], ...] = (
    ("cause", lambda one: one.cause),
    ("look at", lambda one: one.evidence),
    ("do", lambda one: one.next),
)
"""Headings of an explanation, here and in docs/codes.md."""


def explanations_screen(body: Explanations, wide: bool) -> ScreenPart:
    """Each of its meanings; the test that brings it about when wide."""
    return spaced(_screen(one, wide) for one in body.explanations)


def _screen(one: Explanation, wide: bool) -> ScreenPart:
    lines: list[ScreenPart] = [(Styled(one.code, "bold"), f" ({one.shown_by}): {one.summary}")]
    for heading, text in (*PARTS, *(("test", lambda one: one.provoked_by),) * wide):
        if text(one):
            lines += [Styled(heading, "bold"), Indented(text(one))]
    return lines


VIEWS = (
    View(Codes, codes_screen, "codes", CodeName),
    View(Explanations, explanations_screen, "explanations", Explanation),
)
