"""Rows of engines that share prefixes, of one kvd or of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kvctl import daemon
from kvctl.cli.talk import say
from kvd.wire.prefixes.cache import CacheRow, HolderRow

Row = TypeVar("Row", CacheRow, HolderRow)


def seen(rows: Iterable[tuple[str, Row]], where: str, *, watched: bool = False) -> list[tuple[str, Row]]:
    """The rows that this user may see, each with its host.

    How many others there are is said; where there is no row at all, how to come by one, unless it is ``watched``.
    """
    every = list(rows)
    if not every and not watched:
        say(
            f"no engine {where} shares prefixes:"
            ' "prefixes": "on" in its connector\'s settings has it share them; kvctl engines lists all'
        )
    if unseen := sum(row.hidden for _, row in every):
        say(daemon.hidden(unseen, "engines of other users are not shown"))
    return [(host, row) for host, row in every if not row.hidden]
