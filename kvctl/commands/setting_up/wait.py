"""`kvctl wait`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import choice
from kvctl.cli.parsing import near_misses, typed_duration
from kvctl.cli.settings import DEFAULT_TIMEOUT, Settings
from kvctl.errors import DaemonUnreachable, PeerTimeout, UsageError
from kvctl.views.output import show
from kvctl.views.setting_up.wait import Awaited, Wait
from kvd.client.errors import SocketNotPermitted, TimedOut
from kvd.wire import query

SECTION = "Set up"
EXAMPLES = (
    "kvctl wait kvd",
    "kvctl wait engine/prefill-0 engine/decode-0 --timeout 2m",
    "kvctl wait --for gone engine/decode-0",
)
GOALS = ("ready", "gone")
KVD, ENGINE = "kvd", "engine/"
PATIENCE = 30.0
"""Seconds that are waited where no --timeout is given."""
LOOK_AGAIN = 1.0
"""Seconds after which kvd is asked again where no event came: events of the first moment of a connection get lost."""
KNOCK_AGAIN = 0.2
"""Seconds between two looks at a socket where no kvd listens, which nothing but looking can tell."""
SETTLED = 5.0
"""Seconds after its start in which a kvd may not know its engines yet: liveness.settle_seconds."""
CHANGES = ("engine.", "handshake.", "peer.")
"""Events after which an engine's state may be another."""


class _KvdLost(Exception):
    """The connection to kvd ended while an event was waited for."""


def wait(
    settings: Settings,
    *,
    targets: Annotated[
        list[str],
        typer.Argument(metavar="kvd|engine/ID...", help="What to wait for; all of it, where several."),
    ],
    goal: Annotated[str, choice("--for", GOALS, help="What is to be true of them.")] = "ready",
) -> None:
    """Wait until engines, or kvd itself, are ready or gone.

    Ends with 0 once that is so of all. --timeout says how long is waited, 30 s without it; then the exit code is 4, or
    3 where no kvd answers. A kvd that does not run yet is waited for as well. An engine that kvd does not know is gone.
    """
    for target in targets:
        if target != KVD and not (target.startswith(ENGINE) and target != ENGINE):
            raise UsageError(
                f"{target!r} cannot be waited for: write kvd or engine/ID",
                f"an engine of that name: {ENGINE}{target.rpartition('/')[2] or 'ID'}",
            )
    began = time.monotonic()
    deadline = began + (settings.timeout if settings.timeout_given else PATIENCE)
    reached: dict[str, float] = {}
    while True:
        left = deadline - time.monotonic()
        asking = dataclasses.replace(settings, timeout=max(0.05, min(DEFAULT_TIMEOUT, round(left, 3))))
        try:
            states = _follow(asking, targets, goal, deadline, reached, began)
            break
        except (DaemonUnreachable, _KvdLost) as error:
            absent = isinstance(error, DaemonUnreachable) and not isinstance(error.__cause__, TimedOut)
            if absent and goal == "gone" and set(targets) == {KVD}:
                states = {KVD: "gone"}
                reached.setdefault(KVD, time.monotonic() - began)
                break
            if isinstance(error, DaemonUnreachable) and time.monotonic() + KNOCK_AGAIN > deadline:
                raise DaemonUnreachable(
                    f"{error.message}; that was so for {typed_duration(round(deadline - began, 3))}",
                    error.hint,
                    error.code,
                ) from error
            time.sleep(KNOCK_AGAIN)
    awaited = (Awaited(target=one, state=states[one], seconds=reached[one]) for one in targets)
    show(Wait(wanted=goal, targets=tuple(awaited)), settings)


def _follow(
    settings: Settings,
    targets: Sequence[str],
    goal: str,
    deadline: float,
    reached: dict[str, float],
    began: float,
) -> dict[str, str]:
    """The states of the targets once all are as wanted. Raises `PeerTimeout`, and whatever keeps kvd from answering."""

    def connected(now: bool) -> None:
        if not now:
            raise _KvdLost

    while True:
        with daemon.connected_here(settings) as operator:
            left = deadline - time.monotonic()
            try:
                # Before the question: what changes after the answer is an event.
                changes = operator.events(CHANGES, max(0.01, min(LOOK_AGAIN, left)), connected)
            except SocketNotPermitted:
                changes = None
            states, why = _look(settings, targets, goal)
            for target, state in states.items():
                if state == goal:
                    reached.setdefault(target, time.monotonic() - began)
                else:
                    reached.pop(target, None)
            if all(state == goal for state in states.values()):
                return states
            if left <= 0:
                raise PeerTimeout(
                    f"not {goal} within {typed_duration(round(deadline - began, 3))}: {'; '.join(why)}",
                    "see kvctl engines and kvctl doctor, or give more --timeout",
                )
            if changes is None:
                time.sleep(min(LOOK_AGAIN, left))
            else:
                next(changes, None)


def _look(settings: Settings, targets: Sequence[str], goal: str) -> tuple[dict[str, str], list[str]]:
    """The state of each target now, and what is to be said of those that are not as wanted."""
    status = daemon.ask(settings, query.GetStatus(), query.KvdStatus)
    rows = daemon.engines(settings) if set(targets) != {KVD} else ()
    settled = status.gauges.get("uptime_seconds", SETTLED) >= SETTLED
    states: dict[str, str] = {}
    why: list[str] = []
    for target in targets:
        if target == KVD:
            states[target] = "draining" if status.draining else "ready"
            told = f"kvd, pid {status.pid}, {'is stopping' if status.draining else 'runs'}"
        else:
            name = target.removeprefix(ENGINE)
            same = [row for row in rows if row.engine.engine_id == name]
            states[target], told = _state(name, same, rows, settled=settled)
        if states[target] != goal:
            why.append(told)
    return states, why


def _state(
    name: str, same: Sequence[query.EngineRow], rows: Sequence[query.EngineRow], *, settled: bool
) -> tuple[str, str]:
    """An engine's state in one word, and in a sentence. One that lives anywhere is not gone."""
    alive = [row for row in same if row.state != "gone"]
    if not alive and (same or settled):
        known = [row.engine.engine_id for row in rows]
        told = f"kvd knows no engine {name}; {near_misses(name, known)}".rstrip("; ")
        return "gone", f"{name} is gone" if same else told
    if not alive:
        return (
            "unknown",
            f"kvd was just started, and does not know its engines yet ({name} is not among them)",
        )
    row = next((row for row in alive if row.state == "ready"), alive[0])
    ranks = f"{len(row.ranks)} of {row.engine.world_size} ranks"
    return row.state, f"{name} is {row.state}, {ranks}" + (f": {row.reason}" if row.reason else "")
