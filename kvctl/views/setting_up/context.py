"""The Contexts and Context documents: what `kvctl context` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.fleet.contexts import Context
from kvctl.views.registry import View, named
from kvctl.views.screen import Column, ScreenPart, facts, number, table


class ContextDocument(Struct, frozen=True, kw_only=True):
    """A fleet as this user names it."""

    name: str
    in_use: Annotated[bool, Meta(description="--fleet and --host go by it")]
    key_file: Annotated[str, Meta(description="the pair to speak with; empty where hosts have no keys")]
    list_file: Annotated[str, Meta(description="the keys of the hosts; empty where these have none")]
    hosts: Annotated[tuple[str, ...], Meta(description="host:port; empty: those in list_file")]


class Contexts(Struct, frozen=True, kw_only=True):
    """All contexts of this user."""

    contexts: tuple[ContextDocument, ...]


def context_document(name: str, context: Context, used: str) -> ContextDocument:
    """The document of a context; ``used`` is the name of the one in use."""
    return ContextDocument(
        name=name,
        in_use=name == used,
        key_file=str(context.pair) if context.keys else "",
        list_file=str(context.trusted) if context.keys else "",
        hosts=context.hosts,
    )


def contexts_screen(body: Contexts, wide: bool) -> ScreenPart:
    """One context a line."""
    return table(
        body.contexts,
        Column("CONTEXT", lambda one: one.name),
        Column("IN USE", lambda one: "yes" if one.in_use else "-"),
        number("HOSTS", lambda one: len(one.hosts) or "-"),
        Column("KEYS", lambda one: one.key_file or "none"),
        Column("LIST", lambda one: one.list_file or "none", wide),
    )


def context_screen(body: ContextDocument, wide: bool) -> ScreenPart:
    """One fact a line."""
    del wide
    return facts(
        ("context", body.name),
        ("in use", "yes" if body.in_use else "no"),
        ("key file", body.key_file or "none: its hosts have no keys"),
        ("list", body.list_file or "none"),
        ("hosts", ", ".join(body.hosts) or "those in the list"),
    )


VIEWS = (
    View(Contexts, contexts_screen, "contexts", ContextDocument, named("contexts", lambda one: one.name)),
    View(ContextDocument, context_screen),
)
