"""`kvctl events`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.documents.event import event_document
from kvctl.errors import PeerUnreachable
from kvctl.parsing import count
from kvctl.render.output import show
from kvctl.settings import Settings
from kvd.wire import query


def events(
    settings: Settings,
    *,
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...", help="Only events whose kind begins so: transfer, lease.expired ..."
        ),
    ] = None,
    number: Annotated[
        int | None, typer.Option("--count", "-n", metavar="N", parser=count, help="End after so many events.")
    ] = None,
) -> None:
    """Follow what happens, one event a line.

    Ends with Ctrl-C or after --count. With --timeout it also ends, with exit code 4, when nothing happened for that
    long. A gap in the sequence is told on stderr.
    """
    with daemon.connected(settings) as operator:
        stream = daemon.follow(
            operator, tuple(kinds or ()), settings.timeout if settings.timeout_given else None
        )
        # Only a kvd that answers is worth waiting for: a socket alone says nothing of the process behind it.
        daemon.put(operator, query.GetStatus(), query.Status)
        shown, last = 0, None
        for event in stream:
            if last is not None and not kinds and event.seq != last + 1:
                sys.stderr.write(f"kvctl: {_gap(last, event.seq)}\n")
            last = event.seq
            show(event_document(event), settings)
            shown += 1
            if shown == number:
                return
    wanted = f" of the {number} asked for" if number else ""
    raise PeerUnreachable(
        f"nothing happened for {settings.timeout:g} s; {shown} events{wanted} came",
        "give more --timeout, or none",
    )


def _gap(last: int, now: int) -> str:
    if now <= last:
        return f"kvd began to count anew at {now}: it was started again"
    return f"{now - last - 1} events were lost between {last} and {now}"
