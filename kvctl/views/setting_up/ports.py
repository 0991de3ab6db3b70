"""The Ports document: what `kvctl ports` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, Styled, number, table
from kvd.addresses import join_address
from kvd.errors import joined


class ListeningSocket(Struct, frozen=True, kw_only=True):
    """A socket on this host that accepts connections."""

    host: Annotated[str, Meta(description="address; empty for a Unix socket")]
    port: Annotated[int, Meta(ge=0, le=65535, description="0 for a Unix socket")]
    path: Annotated[str, Meta(description="of a Unix socket")]
    pids: Annotated[
        tuple[int, ...], Meta(description="who has it open; empty where this user may not see that")
    ]
    process: Annotated[str, Meta(description="the first one's name")]
    what: Annotated[str, Meta(description="what it is for, as far as known")]


class PortFinding(Struct, frozen=True, kw_only=True):
    """Something about ports that keeps a process from starting, or may."""

    code: Annotated[str, Meta(description="stable")]
    state: Annotated[
        Literal["failed", "warning"], Meta(description="failed: two want one port; warning: they may")
    ]
    port: Annotated[int, Meta(ge=1, le=65535)]
    found: str
    hint: Annotated[str, Meta(description="what to do")]


class Ports(Struct, frozen=True, kw_only=True):
    """Who listens where on this host, and what collides."""

    sockets: tuple[ListeningSocket, ...]
    findings: tuple[PortFinding, ...]


MOST_ALIKE = 3
"""Sockets of one process at one address, of which the same is known, that have a row each; of more the first."""


def ports_screen(body: Ports, wide: bool) -> ScreenPart:
    """The sockets, then what is wrong; those that torch opens by the dozen in each worker in one row, unless wide."""
    parts: list[ScreenPart] = []
    if body.sockets:
        alike: dict[object, list[ListeningSocket]] = {}
        for socket in body.sockets:
            told = (socket.pids, socket.process, socket.what)
            own = socket.path or socket.port if wide or socket.path else 0
            alike.setdefault((socket.host, own, *told), []).append(socket)
        rows = [
            (one, len(same) if len(same) > MOST_ALIKE else 1)
            for same in alike.values()
            for one in (same[:1] if len(same) > MOST_ALIKE else same)
        ]
        parts.append(
            table(
                sorted(rows, key=lambda row: body.sockets.index(row[0])),
                Column("LISTENS", _listens),
                number("PID", lambda row: ",".join(map(str, row[0].pids)) or None),
                Column("PROCESS", lambda row: row[0].process or None),
                Column("NOTE", lambda row: row[0].what or "-"),
            )
        )
    for one in body.findings:
        style = "red" if one.state == "failed" else "yellow"
        parts += ["", (Styled(f"{one.state}  ", style), f"{one.code}: {joined(one.found, one.hint)}")]
    if not body.findings:
        parts += ["", Styled("no two want one port", "green")]
    return parts if body.sockets else parts[1:]


def _listens(row: tuple[ListeningSocket, int]) -> str:
    one, count = row
    where = one.path or join_address(one.host, one.port)
    return f"{where}, {count - 1} more" if count > 1 else where


VIEWS = (View(Ports, ports_screen, "sockets", ListeningSocket),)
