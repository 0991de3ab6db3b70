"""Measures KvdConnector on GPUs, or at tiny sizes on CPUs; writes results.jsonl and logs.tar.gz into a folder.

    PYTHONPATH=daemon:. python3 -m benchmarks.gpu --out DIR [--only STAGE,...] [--budget SECONDS] [--device cpu]

Stages run one after the other, each within its own time and all within the budget; one that fails does not stop the
next. `python3 -m benchmarks.gpu.tables DIR ...` makes the tables of docs/gpu.md of what one or several runs wrote.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.fleet import SIZES, Fleet, two_kvds
from benchmarks.gpu.machine import describe
from benchmarks.gpu.report import Report
from benchmarks.gpu.stages import STAGES, Stage

RESERVE = 12.0
"""Seconds kept back for ending engines and packing logs."""


class StageTimeout(Exception):
    """A stage's time is up."""


def main() -> int:
    """Run the stages; 0 when all went through."""
    options = _options()
    report = Report(options.out)
    ends = time.monotonic() + options.budget
    stages = [s for s in STAGES if s.name in options.only] if options.only else [s for s in STAGES if s.usual]
    machine = describe(options.device)
    report.note("machine", **machine)
    report.say(f"{machine}")
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="gb-", dir=options.work))
    failed = 0
    try:
        with two_kvds(folder) as hosts:
            fleet = Fleet(
                device=options.device,
                sizes=SIZES[options.device],
                folder=folder,
                lasting=options.work or folder,
                report=report,
                gpus=machine["gpus"],
                hosts=hosts,
                quick=options.quick,
                ways=options.ways,
            )
            for stage in stages:
                failed += not _run(stage, fleet, ends - RESERVE)
                report.keep_logs(fleet.logs())
    finally:
        report.say(f"ended, {failed} of {len(stages)} stages failed")
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def _run(stage: Stage, fleet: Fleet, ends: float) -> bool:
    """One stage within its time; whether it went through."""
    report = fleet.report
    report.stage = stage.name
    seconds = min(stage.seconds * (1 if fleet.device == "cuda" else 4), ends - time.monotonic())
    if fleet.gpus < stage.gpus:
        report.note("skipped", why=f"needs {stage.gpus} GPUs, there are {fleet.gpus}")
        report.say(f"{stage.name}: skipped, needs {stage.gpus} GPUs")
        return True
    if seconds < stage.least:
        report.note("skipped", why=f"{seconds:.0f} s are left, it needs {stage.least:g}")
        report.say(f"{stage.name}: skipped, no time left")
        return False
    report.say(f"{stage.name}: begins, {seconds:.0f} s")
    began = time.monotonic()
    error = ""
    try:
        with _limit(seconds):
            stage.run(fleet)
    except Exception as raised:  # noqa: BLE001 - the next stage is still worth running
        error = f"{type(raised).__name__}: {raised}"[:4000]
        report.say(f"{stage.name}: FAILED {traceback.format_exc()[-3000:]}")
    report.note("stage", seconds=round(time.monotonic() - began, 1), error=error)
    report.say(f"{stage.name}: {'failed' if error else 'done'} after {time.monotonic() - began:.1f} s")
    return not error


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise `StageTimeout` in the main thread when time is up."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise StageTimeout(f"{seconds:.0f} s are over")

    before: Any = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__, formatter_class=raw)
    names: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731 - argparse wants a callable
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=names, default=[], help=", ".join(s.name for s in STAGES))
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument(
        "--work", type=Path, default=None, help="folder that keeps models and compiled kernels for later runs"
    )
    parser.add_argument("--ways", type=names, default=[], help="only these: direct, nixl, stock-nixl, ...")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    unknown = set(options.only) - {s.name for s in STAGES}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main())
