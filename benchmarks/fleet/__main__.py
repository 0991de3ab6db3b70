"""A fleet on this machine, in real kvds, and in a model beyond what it bears. docs/fleet.md has the figures.

    PYTHONPATH=daemon:. python -m benchmarks.fleet --hosts 16@4,64@12 --model 256,1024,4096 --out fleet.json
    PYTHONPATH=daemon:. python -m benchmarks.fleet --ask 256 --silent 10 --slower 40 --out asked.json
    PYTHONPATH=daemon:. python -m benchmarks.fleet --show fleet.json asked.json

``64@12``: 64 hosts, by a clock that is 12 times slower than the wall's (`benchmarks.fleet.slow_clock`); each size runs
in a process of its own. Takes only loopback, and as many descriptors as hosts times two for each kvd.
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.fleet import slow_clock
from benchmarks.fleet.table import Report, text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", default="", metavar="COUNT@SLOWER,...", help="sizes of real fleets")
    parser.add_argument("--etcd", action="store_true", help="they find each other by an etcd")
    parser.add_argument("--workers", type=int, default=1, help="of each engine in real fleets [1]")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of the steady state [2]")
    parser.add_argument("--model", default="", metavar="COUNT[:PEERS],...", help="sizes of modelled fleets")
    parser.add_argument("--model-workers", type=int, default=8, help="of each host in the model [8]")
    parser.add_argument("--ask", type=int, default=0, metavar="HOSTS", help="time kvctl --fleet on so many")
    parser.add_argument("--silent", type=int, default=0, help="of those that stay silent [0]")
    parser.add_argument("--rounds", type=int, default=3, help="times that each command is typed [3]")
    parser.add_argument("--only", action="append", default=[], metavar="COMMAND", help="of kvctl's commands")
    parser.add_argument("--slower", type=float, default=20.0, help="the clock of those hosts [20]")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--show", nargs="+", type=Path, help="print the tables of such files, and do nothing")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.show:
        print(text(_together(given.show)), end="")
        return
    if given.part:
        _part(given)
        return
    report = _measure(given)
    if given.out:
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print(text(report), end="")


def _measure(given: argparse.Namespace) -> Report:
    """Each part in a process of its own, as a clock can be slowed down once."""
    report = Report()
    sizes = [size.partition("@")[::2] for size in filter(None, given.hosts.split(","))]
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        for count, slower in sizes:
            made = _run("hosts", count, slower or "1", report, Path(folder), given)
            report = msgspec.structs.replace(report, real=(*report.real, *made.real))
        if report.real:
            slowest = max(run.slower for run in report.real)
            made = _run("costs", "0", str(slowest), report, Path(folder), given)
            report = msgspec.structs.replace(report, costs=made.costs)
        if given.ask:
            made = _run("ask", str(given.ask), str(given.slower), report, Path(folder), given)
            report = msgspec.structs.replace(report, asked=made.asked)
    if report.costs is not None:
        from benchmarks.fleet.model import predict

        for size in filter(None, given.model.split(",")):
            hosts, _, peers = size.partition(":")
            one = predict(int(hosts), given.model_workers, report.costs, int(peers) if peers else None)
            report = msgspec.structs.replace(report, model=(*report.model, one))
    return report


def _run(
    part: str, count: str, slower: str, before: Report, folder: Path, given: argparse.Namespace
) -> Report:
    file = folder / "part.json"
    file.write_bytes(msgspec.json.encode(before))
    words = ["--part", part, "--ask", count, "--slower", slower, "--out", str(file)]
    words += ["--workers", str(given.workers), "--window", str(given.window), "--silent", str(given.silent)]
    words += ["--etcd"] if given.etcd else []
    words += ["--rounds", str(given.rounds), *(word for name in given.only for word in ("--only", name))]
    done = subprocess.run([sys.executable, "-m", "benchmarks.fleet", *words], env=os.environ, check=False)
    if done.returncode:
        raise SystemExit(f"the part with {part} {count} failed")
    return msgspec.json.decode(file.read_bytes(), type=Report)


def _part(given: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that hosts are ended and folders removed
    slow_clock.slow_down(given.slower)
    report = msgspec.json.decode(given.out.read_bytes(), type=Report)
    if given.part == "hosts":
        from benchmarks.fleet.real import measure

        report = Report(real=(measure(given.ask, given.workers, given.window, etcd=given.etcd),))
    elif given.part == "costs":
        from benchmarks.fleet.costs import measured

        report = Report(costs=measured(report.real))
    else:
        from benchmarks.fleet.asking import ask

        report = Report(asked=ask(given.ask, given.silent, given.rounds, given.only))
    given.out.write_bytes(msgspec.json.encode(report))


def _together(files: Sequence[Path]) -> Report:
    """Later files' figures after, or in place of, those of the ones before."""
    whole = Report()
    for file in files:
        one = msgspec.json.decode(file.read_bytes(), type=Report)
        whole = Report(
            real=(*whole.real, *one.real),
            costs=one.costs or whole.costs,
            model=(*whole.model, *one.model),
            asked=one.asked or whole.asked,
        )
    return whole


if __name__ == "__main__":
    main()
