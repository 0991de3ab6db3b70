"""`kvctl events`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import number
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import DaemonUnreachable, PeerTimeout
from kvctl.views.event import event_document
from kvctl.views.output import show
from kvd.wire import query

SECTION = "Look"


def events(
    settings: Settings,
    *,
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...", help="Only events whose kind begins so: transfer, lease.expired ..."
        ),
    ] = None,
    number: Annotated[int | None, number("--count", "-n", help="End after so many events.")] = None,
) -> None:
    """Follow what happens, one event a line.

    Ends with Ctrl-C or after --count. With --timeout it also ends when nothing came for that long: with exit code 4,
    or 3 where kvd itself is gone. A gap in the sequence is told on stderr, and when kvd goes away and comes back.
    """
    gone = False

    def connected(now: bool) -> None:
        nonlocal gone
        if now == gone:
            say(f"kvd {'is back' if now else 'went away; waiting for it to come back'}")
            gone = not now

    with daemon.connected(settings) as operator:
        patience = settings.timeout if settings.timeout_given else None
        stream = operator.events(tuple(kinds or ()), patience, connected)
        # Only a kvd that answers is worth waiting for: a socket alone says nothing of the process behind it.
        daemon.put(operator, query.GetStatus(), query.KvdStatus)
        shown, last = 0, None
        for event in stream:
            if last is not None and not kinds and event.seq != last + 1:
                say(_gap(last, event.seq))
            last = event.seq
            show(event_document(event), settings)
            shown += 1
            if shown == number:
                return
    if gone:
        raise DaemonUnreachable(
            f"kvd went away and did not come back; {shown} events came before", "see `systemctl status kvd`"
        )
    wanted = f" of the {number} asked for" if number else ""
    raise PeerTimeout(
        f"nothing happened for {settings.timeout:g} s; {shown} events{wanted} came",
        "give more --timeout, or none",
    )


def _gap(last: int, now: int) -> str:
    if now <= last:
        return f"kvd began to count anew at {now}: it was started again"
    return f"{now - last - 1} events were lost between {last} and {now}"
