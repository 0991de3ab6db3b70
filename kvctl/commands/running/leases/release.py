"""`kvctl leases release`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.commands.running.leases.rows import named_leases
from kvctl.errors import CheckFailed
from kvctl.views.output import show
from kvctl.views.running.leases import ReleasedLease, ReleasedLeases, ended_document, missed_documents
from kvd.wire.order import EndLease, ForceMiss, ForcePlan, LeaseEnding, OneRequest
from kvd.wire.query import LeaseRow

SECTION = "Commands"
EXAMPLES = ("kvctl leases release LEASE --yes",)


def release(
    settings: Settings,
    *,
    lease: Annotated[
        str, typer.Argument(metavar="ID", help="REQUEST or ENGINE/REQUEST, as kvctl leases -o name has it.")
    ],
    engine: Annotated[
        str, typer.Option("--engine", "-e", metavar="ENGINE", help="Only a lease of this engine.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")] = False,
) -> None:
    """End a lease before its time.

    At the prefiller's kvd nobody else is let in: who comes for the blocks computes the prompt. A claim keeps what it
    was promised, since it may be reading now. At the reading engine's kvd its load misses, the prompt is computed
    again, and its claim is released. Does that with --yes. Refused with exit code 5 where that engine cannot recover
    (policy fail), 6 for users who may not, 1 where there is no such lease.
    """
    rows = named_leases(settings, lease, engine)
    readers = {row.reader: row for row in rows if row.reader}
    given = [row for row in rows if not row.reader]
    done: list[ReleasedLease] = []
    # All is planned before anything is done: a reader that cannot recover has nothing changed.
    for carry_out in (False, True) if yes else (False,):
        done = []
        for row in given:
            order = EndLease(engine_id=row.engine_id, request_id=row.request_id, carry_out=carry_out)
            done.append(ended_document(daemon.ask(settings, order, LeaseEnding)))
        for reader, row in readers.items():
            done += _missed(settings, row, reader, carry_out=carry_out, alone=not given)
    show(ReleasedLeases(released=tuple(done)), settings)
    if not yes:
        say("nothing was done; add --yes to do it")


def _missed(
    settings: Settings, row: LeaseRow, reader: str, *, carry_out: bool, alone: bool
) -> tuple[ReleasedLease, ...]:
    """Have the loads of an engine here miss. Raises `KvctlError`; what is loaded already is only said, unless alone."""
    order = ForceMiss(engine_id=reader, target=OneRequest(row.request_id), carry_out=carry_out)
    try:
        return missed_documents(row, daemon.ask(settings, order, ForcePlan))
    except CheckFailed as error:
        if alone:
            raise
        if carry_out:
            say(f"of {reader} nothing is to miss: {error.message}")
        return ()
