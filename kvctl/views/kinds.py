"""The Kinds document: what `kvctl schema` prints without an argument."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.registry import View, kind_of, views
from kvctl.views.screen import Column, ScreenPart, table


class KindName(Struct, frozen=True, kw_only=True):
    """One kind of document."""

    name: str
    items: Annotated[
        str | None, Meta(description="kind of its items, each a line with -o jsonl; null when no list")
    ]
    summary: str


class Kinds(Struct, frozen=True, kw_only=True):
    """Every kind of document that kvctl prints."""

    kinds: tuple[KindName, ...]


def kinds_document() -> Kinds:
    """All kinds with the first line of what they are."""
    return Kinds(
        kinds=tuple(
            KindName(
                name=kind,
                items=kind_of(view.item) if view.item else None,
                summary=(view.struct.__doc__ or "").splitlines()[0],
            )
            for kind, view in views().items()
        )
    )


def kinds_screen(body: Kinds, wide: bool) -> ScreenPart:
    """One kind a line; what its items are when wide."""
    return table(
        body.kinds,
        Column("KIND", lambda kind: kind.name),
        Column("ITEMS", lambda kind: kind.items or "-", wide),
        Column("SUMMARY", lambda kind: kind.summary),
    )


VIEWS = (View(Kinds, kinds_screen, "kinds", KindName),)
