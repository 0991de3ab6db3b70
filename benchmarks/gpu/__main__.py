"""Measures KvdConnector on GPUs, or at tiny sizes on CPUs; writes results.jsonl and logs.tar.gz into a folder.

    PYTHONPATH=daemon:. python3 -m benchmarks.gpu --out DIR [--only STAGE[+STAGE],...] [--budget SECONDS] [--device cpu]

Stages run one after the other, those joined by + in one wave (`benchmarks.gpu.waves`), each within its own time and all
within the budget; one that fails does not stop the next. `python3 -m benchmarks.gpu.tables DIR ...` makes the tables of
docs/gpu.md of what one or several runs wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.fleet import SIZES, Fleet, two_kvds
from benchmarks.gpu.machine import describe
from benchmarks.gpu.report import Report
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.waves import Stage, run_wave

RESERVE = 12.0
"""Seconds kept back for ending engines and packing logs."""


def main(stages: Sequence[Stage] = STAGES, name: str = "benchmarks.gpu", what: str | None = __doc__) -> int:
    """Run these stages; 0 when all went through. ``name`` is the module's that is run, ``what`` says what it does."""
    options = _options(stages, name, what)
    report = Report(options.out)
    ends = time.monotonic() + options.budget
    by_name = {stage.name: stage for stage in stages}
    waves = [[by_name[name] for name in wave] for wave in options.only] or [[s] for s in stages if s.usual]
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
                options=dict(options.option),
                quick=options.quick,
                rounds=options.rounds,
                pairs=options.pairs,
                ways=options.ways,
                starts=options.starts,
            )
            for wave in waves:
                failed += run_wave(fleet, wave, ends - RESERVE)
                report.keep_logs(fleet.logs())
    finally:
        report.say(f"ended, {failed} of {sum(map(len, waves))} stages failed")
        report.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def _options(stages: Sequence[Stage], name: str, what: str | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=what, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=_waves, default=[], help=", ".join(s.name for s in stages))
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument(
        "--work", type=Path, default=None, help="folder that keeps models and compiled kernels for later runs"
    )
    parser.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        default=[],
        help="direct, stock-nixl, ..., or of some of their pairs: direct-pull, stock-nixl-pull-joined, ...",
    )
    parser.add_argument(
        "--option", type=_option, action="append", default=[], help="of every connector: NAME=VALUE, as JSON"
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=0,
        help="workers that may start at the same time, if not as many as usual",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0, help="of pairs that serve, if not as many as usual")
    parser.add_argument("--pairs", type=int, default=1, help="that serve, of each way")
    options = parser.parse_args()
    unknown = {name for wave in options.only for name in wave} - {s.name for s in stages}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    return options


def _option(text: str) -> tuple[str, Any]:
    """A setting's name and value; a value that is no JSON is a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _waves(text: str) -> list[list[str]]:
    """Waves of names of stages."""
    return [wave.split("+") for wave in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
