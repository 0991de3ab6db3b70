"""The PrefixHolders document: what `kvctl prefix` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from kvctl.cli.units import Count
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, measure, names, table
from kvd.wire.prefixes.cache import HolderRow


class PrefixHolding(Struct, frozen=True, kw_only=True):
    """What one engine of this host holds of a prompt, or of a block."""

    engine_id: str
    generation: str
    held: Annotated[bool, Meta(description="anything of the prompt; of a block: by every group")]
    tokens: Annotated[Count | None, Meta(description="of the prompt, from its first one on; null of a block")]
    blocks: Annotated[
        tuple[Count, ...], Meta(description="in so many blocks, by KV cache group; of a block 1 or 0")
    ]
    trouble: Annotated[str, Meta(description="why its scheduler did not tell")]


class PrefixHolders(Struct, frozen=True, kw_only=True):
    """What the engines of this host that share prefixes hold of a prompt, or of a block."""

    asked: Literal["tokens", "block"]
    tokens: Annotated[Count | None, Meta(description="of the prompt; null of a block")]
    holders: tuple[PrefixHolding, ...]


Holding = TypeVar("Holding", bound=PrefixHolding)


def holder_document(row: HolderRow, *, prompt: bool) -> PrefixHolding:
    """The document of one row of kvd's answer."""
    found = row.found
    return PrefixHolding(
        engine_id=row.engine_id,
        generation=row.generation,
        held=found.tokens > 0 if prompt else bool(found.blocks) and all(found.blocks),
        tokens=found.tokens if prompt else None,
        blocks=found.blocks,
        trouble=row.trouble,
    )


def holders_screen(body: PrefixHolders, wide: bool) -> ScreenPart:
    """One engine a line, who holds most of it first."""
    holders = most_first(body.holders)
    return table(holders, *holder_columns(holders, body.tokens, wide))


def most_first(holders: Iterable[Holding]) -> list[Holding]:
    """Who holds most of the prompt first; of a block those that have it."""
    return sorted(holders, key=lambda one: (-(one.tokens or 0), not one.held))


def holder_columns(holders: Sequence[PrefixHolding], asked: int | None, wide: bool) -> list[Column[Any]]:
    """The columns of engines, their name first; ``asked`` are the tokens of the prompt, None of a block."""
    prompt = asked is not None
    troubled = wide or any(one.trouble for one in holders)
    return [
        names("ENGINE", lambda one: one.engine_id),
        names("GENERATION", lambda one: one.generation or "-", wide),
        names("HELD", lambda one: "yes" if one.held else "no", not prompt),
        measure("TOKENS", lambda one: one.tokens, lambda one: one.tokens, prompt),
        measure("OF", lambda _: asked, lambda _: asked, prompt),
        names("BLOCKS", lambda one: " + ".join(map(str, one.blocks)) or "-"),
        names("REASON", lambda one: one.trouble or "-", troubled),
    ]


def holder_names(holders: Iterable[PrefixHolding]) -> str:
    """The engines that hold anything of it, one a line."""
    return "".join(f"{one.engine_id}\n" for one in holders if one.held)


VIEWS = (
    View(
        PrefixHolders,
        holders_screen,
        "holders",
        PrefixHolding,
        {"name": lambda body: holder_names(body.holders)},
    ),
)
