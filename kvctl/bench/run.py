"""A whole `kvctl benchmark`: chooses backends, measures one after the other, shows and reports."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvctl.bench.measure import Difference, Measured, Sweep, TellStep, measure, steps
from kvctl.bench.pair import BackendRun
from kvctl.bench.remote import ServeTarget
from kvctl.bench.sizing import Sized, sized
from kvctl.cli.report_file import check_report, write_report
from kvctl.cli.settings import Settings
from kvctl.cli.talk import plain_lines
from kvctl.errors import CheckFailed, UsageError
from kvctl.processes.errors import WorkerFailed
from kvctl.processes.interruption import held, one_interruption, unwinding
from kvctl.views.measuring.benchmark import Benchmark
from kvctl.views.output import show
from kvctl.views.registry import moment
from kvd.backends.contract import Operation
from kvd.backends.registry import MEASURED, available
from kvd.geometry.model import EngineGeometry
from kvd.shown import escaped

T = TypeVar("T")


@dataclass(frozen=True)
class BenchmarkOptions:
    """What `kvctl benchmark` was asked for; no backends means all there are.

    ``seconds`` is for all rounds together, and decides only when they end earlier than ``rounds``.
    """

    pair: tuple[EngineGeometry, EngineGeometry]
    backends: tuple[str, ...]
    operations: tuple[Operation, ...]
    tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    fragmentations: tuple[str, ...]
    rounds: int
    memory: int
    seconds: float
    verify: bool
    plot: bool
    report: Path | None
    devices: tuple[int | None, int | None]
    to: ServeTarget | None


def run(wanted: BenchmarkOptions, settings: Settings) -> None:
    """Measure, show, write the report.

    Raises `CheckFailed` for a wrong byte, for what does not fit, and where no backend could measure anything.
    """
    check_report(wanted.report)
    names, notes = usable(wanted.backends)
    place = sized(*wanted.pair, wanted.tokens, wanted.concurrency, wanted.memory)
    sweep = Sweep(
        sizes=place.sizes,
        fragmentations=wanted.fragmentations,
        operations=wanted.operations,
        rounds=wanted.rounds,
        verify=wanted.verify,
        seconds=wanted.seconds / len(names) / len(wanted.operations),
    )
    began, load = time.time(), os.getloadavg()[0]
    with workplace() as folder, progress(steps(sweep, len(names)), settings) as told:
        ways = {
            name: functools.partial(
                measure, place.scene, BackendRun(name, devices=wanted.devices), sweep, folder, told, wanted.to
            )
            for name in names
        }
        found, failures = tried(ways, wanted.backends, "run it again with --backend of one engine at a time")
    failures += [note for one in found for note in one.notes]
    if not any(one.rows for one in found):
        raise CheckFailed(
            "; ".join(failures) or f"{', '.join(names)} cannot {' or '.join(wanted.operations)}",
            "name another --backend or --operation",
        )
    document = _document(wanted, place, found, notes + failures, (began, load))
    show(document, settings)
    if wanted.plot and settings.output in ("table", "wide"):
        from kvctl.views.measuring.benchmark import benchmark_plot

        sys.stdout.write(plain_lines(benchmark_plot(document)))
    if wanted.report is not None:
        from kvctl.views.reports.benchmark import benchmark_page

        write_report(wanted.report, benchmark_page(document))


def tried(
    ways: Mapping[str, Callable[[], T]], needed: Container[str], alone: str
) -> tuple[list[T], list[str]]:
    """What each way gives, by its name, and a note on each that cannot be run.

    Raises `CheckFailed` for one that is needed and for wrong bytes; ``alone`` says how to try a way alone.
    """
    found, notes = [], []
    for name, way in ways.items():
        try:
            found.append(way())
        except Difference as error:
            raise CheckFailed(f"wrong bytes landed: {error}", alone) from None
        except WorkerFailed as error:
            if name in needed:
                raise failed(error) from None
            notes.append(f"{name} is left out: {first_line(error)}")
    return found, notes


def usable(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """The backends to run, and notes on those that cannot. Raises `UsageError` for one that was asked for."""
    states = available()
    names, notes = [], []
    for name in asked or MEASURED:
        if not states[name].startswith("not installed"):
            names.append(name)
        elif asked:
            raise UsageError(f"{name} is {states[name]}", f"type `pip install 'kvctl[{name}]'`")
        else:
            notes.append(f"{name} is left out: {states[name]}")
    return names, notes


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder for logs, removed at the end; the first Ctrl-C ends what was entered in it, in order."""
    with one_interruption(""), unwinding() as stack:
        with held():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvctl-bench-")))
        yield folder


@contextlib.contextmanager
def progress(total: int, settings: Settings) -> Iterator[TellStep]:
    """A bar on stderr where that is a terminal; gives the function that moves it on by a step."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True, no_color=settings.color == "never")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, advance=1, description=escape(escaped(text)))


def failed(error: WorkerFailed) -> CheckFailed:
    """The error in one line; the log that came with it goes to stderr before."""
    _, _, log = str(error).partition("\n")
    if log:
        sys.stderr.write(plain_lines(log) + "\n")
    return CheckFailed(first_line(error), "see the log above" if log else "see docs/benchmark.md")


def first_line(error: Exception) -> str:
    """What happened, without the end of a log."""
    return str(error).partition("\n")[0].removesuffix(":").removesuffix("; the end of its log")


def _document(
    wanted: BenchmarkOptions,
    place: Sized,
    found: Sequence[Measured],
    notes: list[str],
    when: tuple[float, float],
) -> Benchmark:
    (local, remote), (began, load) = wanted.pair, when
    shown = place.scene
    sources = [shown.sources[at] for at in shown.plan.sources]
    return Benchmark(
        model=local.model,
        local=local.engine_id,
        remote=remote.engine_id,
        local_rank=str(shown.reader.rank),
        remote_ranks=tuple(str(worker.rank) for worker in sources),
        memory=shown.bytes,
        blocks=(shown.reader.num_blocks, sources[0].num_blocks),
        devices=tuple("cpu" if number is None else f"cuda:{number}" for number in wanted.devices),
        to=wanted.to.name if wanted.to else "",
        cores=os.cpu_count() or 1,
        load=load,
        started=moment(began),
        seconds=time.time() - began,
        measurements=tuple(row for one in found for row in one.rows),
        warnings=tuple(warned for one in found for warned in one.warnings),
        notes=(*notes, *place.notes),
    )
