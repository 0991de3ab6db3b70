"""`kvctl events`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import number
from kvctl.cli.parsing import near_misses
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import DaemonUnreachable, PeerTimeout, UsageError
from kvctl.views.event import event_document
from kvctl.views.output import show
from kvd.wire import query
from kvd.wire.event import KINDS

SECTION = "Look"
EXAMPLES = (
    "kvctl events",
    "kvctl events transfer.miss lease -o jsonl",
    "kvctl events engine.ready -n 1 --timeout 2m  # until an engine is ready",
)


def events(
    settings: Settings,
    *,
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="Only events whose kind begins so: transfer, lease.expired. All: docs/cli.md.",
        ),
    ] = None,
    number: Annotated[
        int | None, number("--count", "--limit", "-n", help="End after so many events.")
    ] = None,
) -> None:
    """Follow what happens, one event a line.

    Ends with Ctrl-C or after --count. With --timeout it also ends when nothing came for that long: with exit code 4,
    or 3 where kvd itself is gone. A gap in the sequence is told on stderr, and when kvd goes away and comes back.
    """
    for kind in kinds or ():
        if not any(known.startswith(kind) for known in KINDS):
            raise UsageError(
                f"no event's kind begins with {kind!r}; {_meant(kind)}", "docs/cli.md lists all kinds"
            )
    gone = False

    def connected(now: bool) -> None:
        nonlocal gone
        if now == gone:
            say(f"kvd {'is back' if now else 'went away; waiting for it to come back'}")
            gone = not now

    with daemon.connected_here(settings) as operator:
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


def _meant(kind: str) -> str:
    """The kinds that are near, else what kinds begin with."""
    near = near_misses(kind, KINDS)
    families = dict.fromkeys(known.partition(".")[0] for known in KINDS)
    return near if near.startswith("did you mean") else near_misses(kind, families)


def _gap(last: int, now: int) -> str:
    if now <= last:
        return f"kvd began to count anew at {now}: it was started again"
    return f"{now - last - 1} events were lost between {last} and {now}"
