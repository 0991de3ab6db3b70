"""`kvctl drain`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli import numbers
from kvctl.cli.options import ListSettings
from kvctl.cli.parsing import near_misses, seconds, typed_duration
from kvctl.cli.settings import DEFAULT_TIMEOUT, Settings
from kvctl.cli.talk import say
from kvctl.commands.running.leases.rows import every_lease
from kvctl.errors import DaemonUnreachable, PeerTimeout, RefusedError, UsageError
from kvctl.views.output import show
from kvctl.views.running.drain import drains_document
from kvctl.views.running.leases import lease_document
from kvd.wire.drain import DrainEngines, DrainRow, EnginesDraining
from kvd.wire.query import GetStatus, KvdStatus

SECTION = "Set up"
EXAMPLES = (
    "kvctl drain prefill-0 --wait",
    "kvctl drain prefill-0 --undo",
)
GRACE = 5.0
"""Seconds in which requests that are on their way are served as ever."""
PATIENCE = 60.0
"""Seconds that --wait waits where no --timeout is given."""
LOOK_AGAIN = 0.25
NAMED = 5
"""Leases that are named where time ran out."""


def duration_or_zero(text: str) -> float:
    """An option's parser for a duration that may be 0."""
    return 0.0 if text in ("0", "0s") else seconds(text)


def drain(
    settings: ListSettings,
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE|HOST",
            help="An engine, or the host of this kvd: all of its engines, later ones too.",
        ),
    ] = "",
    wait: Annotated[
        bool,
        typer.Option("--wait", help=f"Until nothing is held any more, for --timeout, else {PATIENCE:g}s."),
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Have it take requests again.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="DURATION",
            parser=duration_or_zero,
            help=f"How long requests on their way are served as ever; 0: not at all. [{GRACE:g}s]",
        ),
    ] = None,
) -> None:
    """Have an engine hand over what it holds and take nothing new, so that it can be stopped.

    Routers see it at once: draining in kvctl engines, in /metrics and in kv_transfer_params. After --grace it keeps
    no blocks for new requests and loads none, and no further claim on its leases is let in; those requests are
    computed. What is claimed goes on. It can be undone. Without a target: how far each engine is. With --wait: 0 when
    nothing is held, 4 when time ran out, with what still is.
    """
    if undo and (wait or grace is not None):
        raise UsageError("--undo ends a drain: --wait and --grace are for one that begins", "leave them out")
    if not target and (undo or wait or grace is not None):
        raise UsageError(
            "which engine? kvctl drain ENGINE, or the name of this host", "see kvctl engines --local"
        )
    look = DrainEngines(engine_id=_engine_of(settings, target))
    order = look
    if target:
        order = DrainEngines(
            engine_id=look.engine_id,
            action="undo" if undo else "begin",
            grace_seconds=GRACE if grace is None else grace,
        )
    answer = daemon.ask(settings, order, EnginesDraining)
    if wait:
        patience = settings.timeout if settings.timeout_given else PATIENCE
        answer = _waited(settings, look, answer, patience)
        show(drains_document(answer), settings)
        _judge(settings, answer.rows, patience)
        return
    show(drains_document(answer), settings)
    if not answer.rows:
        say("no engine of this host has its scheduler at this kvd")


def _engine_of(settings: Settings, target: str) -> str:
    """The engine that is meant, empty for all of the host. Raises `UsageError` for what is neither."""
    if not target:
        return ""
    rows = [row for row in daemon.engines(settings) if row.local and row.state != "gone"]
    names = [row.engine.engine_id for row in rows]
    if target in names:
        return target
    status = daemon.ask(settings, GetStatus(), KvdStatus)
    if target in (status.host, status.kvd_id, status.endpoint.host, str(status.endpoint)):
        return ""
    near = near_misses(target, names) or "no engine is here"
    raise UsageError(
        f"{target!r} is neither an engine of this host nor this host, {status.host}; {near}",
        "an engine is drained at the kvd of its own host",
    )


def _waited(
    settings: Settings, look: DrainEngines, answer: EnginesDraining, patience: float
) -> EnginesDraining:
    """The answer once nothing is held, or the last before time ran out. A kvd that is started again is waited for."""
    deadline, told = time.monotonic() + patience, False
    while _left(answer.rows) and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(LOOK_AGAIN, left))
        asking = dataclasses.replace(settings, timeout=max(0.05, min(DEFAULT_TIMEOUT, left)))
        try:
            answer = daemon.ask(asking, look, EnginesDraining)
        except RefusedError as error:
            if error.code != "KVD-ENGINE-GONE":
                raise
            say(error.message)
            return EnginesDraining(rows=())
        except DaemonUnreachable as error:
            if time.monotonic() + LOOK_AGAIN > deadline:
                raise
            if not told:
                say(f"{error.message}; still waiting")
            told = True
    return answer


def _left(rows: Sequence[DrainRow]) -> list[DrainRow]:
    """The engines that may still hold something, or take something in."""
    return [row for row in rows if row.held or (row.draining and row.grace > 0) or not row.draining]


def _judge(settings: Settings, rows: Sequence[DrainRow], patience: float) -> None:
    left = _left(rows)
    if not left:
        return
    who = "; ".join(_still(settings, row) for row in left)
    raise PeerTimeout(
        f"not drained within {typed_duration(round(patience, 3))}: {who}",
        "give more --timeout, or end a lease: kvctl leases release ID --yes",
    )


def _still(settings: Settings, row: DrainRow) -> str:
    if not row.draining:
        return f"{row.engine_id} does not drain: it was started again, or somebody had it take requests"
    counted = {
        "leases": row.leases, "reads": row.reads, "prefills": row.prefills, "pushes": row.pushes, "loads": row.loads,
    }  # fmt: skip
    what = ", ".join(f"{count} {name}" for name, count in counted.items() if count) or "nothing yet"
    leases = [lease_document(one, numbers.now()) for one in every_lease(settings, row.engine_id)][:NAMED]
    named = (
        f"{one.request_id} by {', '.join(claimant.name for claimant in one.held_by) or 'nobody'}"
        for one in leases
    )
    return f"{row.engine_id} holds {what}" + (f" ({'; '.join(named)})" if leases else "")
