"""The Kinds document: what `kvctl schema` prints without an argument."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views import registry as document


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
                name=kind.name,
                items=kind.item_kind or None,
                summary=(kind.struct().__doc__ or "").splitlines()[0],
            )
            for kind in document.KINDS
        )
    )
