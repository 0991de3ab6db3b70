"""The leases that kvd knows, all of them, and those that somebody names."""

from __future__ import annotations

from kvctl import daemon
from kvctl.cli.parsing import near_misses
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import CheckFailed, UsageError
from kvd.wire.query import LeaseList, LeaseRow, ListLeases


def every_lease(settings: Settings, engine: str = "") -> tuple[LeaseRow, ...]:
    """All leases, of one engine where that is named. Says what this user may not see. Raises `KvctlError`."""
    asked = ListLeases(every=True, engine_id=engine)
    found: list[LeaseRow] = []
    hidden = 0
    for page in daemon.pages(settings, asked, LeaseList):
        found += page.rows
        hidden = max(hidden, page.hidden)
    if hidden:
        say(daemon.hidden(hidden, "leases of other users' engines are not shown"))
    return tuple(found)


def named_leases(settings: Settings, name: str, engine: str) -> tuple[LeaseRow, ...]:
    """The sides of the lease that is called REQUEST or ENGINE/REQUEST.

    Raises `CheckFailed` where there is none, `UsageError` where that are the leases of several engines.
    """
    rows = every_lease(settings, engine)
    found = tuple(row for row in rows if name in (row.request_id, f"{row.engine_id}/{row.request_id}"))
    if not found:
        close = near_misses(name, [row.request_id for row in rows][:20])
        raise CheckFailed(
            f"no lease {name!r} is open at this kvd" + (f"; {close}" if close else ""),
            "it may have ended meanwhile: kvctl leases lists those that are open",
        )
    owners = sorted({row.engine_id for row in found})
    if len(owners) > 1:
        raise UsageError(
            f"{', '.join(owners)} each have a lease {name!r}", f"write {owners[0]}/{name}, or give --engine"
        )
    return found
