"""Many kvds that find each other by one etcd: seconds until all is warm, and what it costs to stay so.

    python benchmarks/membership.py [--kvds 64] [--settle 5] [--json]

All of them are real, on this one machine, with a real etcd (.ci/setup etcd). The engines on them are simulated, a
worker and a scheduler each, half of them prefillers. What is told, with the processor time of all kvds together:

linked   the last kvd stands in etcd, until each has a link that works to each other one
idle     a second in which nothing happens
join     all engines come up at once, until each was given each that it may move KV to or from
warm     a second in which nothing happens, with all engines
leave    one engine in eight goes, until all others were told
return   these come back, until all is warm again
host     a kvd is killed and started again with its engine, until all is warm again

A fleet has a machine for each kvd; here they share the cores of one. So the processor time says more than the seconds.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvctl.bench.handshake import processor_seconds
from kvd.wire.query import GetStatus, KvdStatus
from tests.support.daemons import Daemon, wait_for
from tests.support.etcd_kvds import SimulatedEngine, all_warm, engine, kvds
from tests.support.etcds import Etcd, etcd

SECONDS = 240.0
"""For anything to happen."""


@dataclass
class Step:
    """One thing that happened: its seconds, the processor time of all kvds, the messages that they took of others."""

    what: str
    seconds: float = 0.0
    processor: float = 0.0
    messages: int = 0


def status(kvd: Daemon) -> KvdStatus:
    """How a kvd is."""
    answer = kvd.ask(GetStatus(), 60.0)
    return cast("KvdStatus", answer)


def messages(made: list[Daemon]) -> int:
    """Messages that the kvds took so far."""
    return sum(
        number
        for kvd in made
        for name, number in status(kvd).counters.items()
        if name in ("received.ping", "received.list_engines", "received.describe_engine")
    )


@contextmanager
def noted(steps: list[Step], what: str, made: list[Daemon]) -> Iterator[Step]:
    """Note a step; what happens in it sets its seconds where that is not the time until it returns."""
    step, before = Step(what), messages(made)
    spent, began = processor_seconds([kvd.pid for kvd in made]), time.monotonic()
    yield step
    step.seconds = step.seconds or time.monotonic() - began
    step.processor = processor_seconds([kvd.pid for kvd in made]) - spent
    step.messages = messages(made) - before
    steps.append(step)


def quiet(steps: list[Step], what: str, made: list[Daemon], settle: float) -> None:
    """A second in which nothing happens, of ``settle`` such seconds."""
    with noted(steps, what, made) as step:
        time.sleep(settle)
    step.processor, step.messages, step.seconds = step.processor / settle, int(step.messages / settle), 1.0


def wait_linked(made: list[Daemon]) -> None:
    """Until each kvd has a link that works to each other one."""
    waiting, deadline = made, time.monotonic() + SECONDS
    while waiting:
        waiting = [k for k in waiting if sum(p.state == "up" for p in status(k).peers) < len(made) - 1]
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(waiting)} kvds are not linked to all others")


def run(count: int, settle: float) -> list[Step]:
    """All steps with so many kvds."""
    steps: list[Step] = []
    with etcd() as server, ExitStack() as stack:
        made = stack.enter_context(kvds(count, server))
        _linked(steps, server, made)
        quiet(steps, "idle", made, settle)
        engines: list[SimulatedEngine] = []
        stack.callback(_close, engines)
        with noted(steps, "join", made) as step:
            engines += [up(kvd, number) for number, kvd in enumerate(made)]
            for one in engines:
                one.ready(SECONDS)
            began = time.monotonic()
            step.seconds = max(1e-9, all_warm(engines, SECONDS) - began)
        quiet(steps, "warm", made, settle)
        going = [number for number in range(count) if number % 8 == 0]
        with noted(steps, "leave", made):
            for number in going:
                engines[number].close()
            all_warm([one for number, one in enumerate(engines) if number not in going], SECONDS)
        with noted(steps, "return", made):
            for number in going:
                engines[number] = up(made[number], number)
            for number in going:
                engines[number].ready(SECONDS)
            all_warm(engines, SECONDS)
        sys.stderr.write("".join(map(line, steps)))
        engines[1].close()
        made[1].kill()
        began = time.monotonic()
        made[1].start()
        engines[1] = up(made[1], 1).ready(SECONDS)
        steps.append(Step("host", all_warm(engines, SECONDS) - began))
        if failed := sum(status(kvd).counters.get("errors.internal", 0) for kvd in made):
            raise SystemExit(f"{failed} internal errors")
        longest = max(status(kvd).gauges["loop.busiest_turn_seconds"] for kvd in made)
        steps.append(Step("busiest turn", longest))
    return steps


def line(step: Step) -> str:
    """A step as text."""
    return f"{step.what:13} {step.seconds:8.3f} s {step.processor:8.2f} s of processors {step.messages:8} messages\n"


def up(kvd: Daemon, number: int) -> SimulatedEngine:
    """The engine of a kvd."""
    return engine(kvd, f"e{number}", "decode" if number % 2 else "prefill")


def _close(engines: list[SimulatedEngine]) -> None:
    for one in engines:
        one.close()


def _linked(steps: list[Step], server: Etcd, made: list[Daemon]) -> None:
    wait_for(lambda: len(server.hosts()) == len(made), SECONDS)
    began = time.monotonic()
    wait_linked(made)
    spent = processor_seconds([kvd.pid for kvd in made])
    steps.append(Step("linked", time.monotonic() - began, spent, messages(made)))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvds", type=int, default=64)
    parser.add_argument("--settle", type=float, default=5.0, help="seconds in which nothing happens")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    steps = run(given.kvds, given.settle)
    if given.json:
        told = {"kvds": given.kvds, "load": os.getloadavg()[0], "steps": [asdict(step) for step in steps]}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    sys.stdout.writelines(map(line, steps))


if __name__ == "__main__":
    main()
