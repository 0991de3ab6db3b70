"""Transfer engines: each one that is installed moves bytes between two processes of this host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvctl.bench.measure import Difference, Sweep, measure
from kvctl.bench.pair import BackendRun, PairScene
from kvctl.bench.run import first_line, workplace
from kvctl.bench.sizing import sized
from kvctl.cli.numbers import rate, size
from kvctl.doctor.checks import checked
from kvctl.engines.sources import planned
from kvctl.processes.errors import WorkerFailed
from kvctl.views.doctor import Check
from kvctl.views.measuring.benchmark import Measurement
from kvd.backends.registry import MEASURED, available

MODEL, SHARDS, TOKENS = "llama-3.1-8b", "tp=8,layout=HND", 512
"""Of what is moved: 8 MiB."""
MEMORY = 64 << 20

_backends = partial(checked, "backends")


def backend_checks() -> Iterator[Check]:
    """The checks; each takes some seconds."""
    engine = planned(MODEL, SHARDS)
    place = sized(engine, engine, (TOKENS,), (1,), MEMORY)
    states = available()
    with workplace() as folder:
        for name in MEASURED:
            if states[name].startswith("not installed"):
                yield _backends(
                    "skipped", name.upper(), f"{name} is not installed here", f"pip install 'kvctl[{name}]'"
                )
            else:
                yield from _moved(name, states[name], place.scene, folder)


def _moved(name: str, version: str, scene: PairScene, folder: Path) -> Iterator[Check]:
    sweep = Sweep(
        sizes=((TOKENS, 1),),
        fragmentations=("contiguous",),
        operations=("read",),
        rounds=3,
        verify=True,
        seconds=5.0,
    )
    code = name.upper()
    try:
        found = measure(scene, BackendRun(name), sweep, folder, lambda _: None)
    except WorkerFailed as error:
        yield _backends(
            "failed", code, f"{name} {version}: {first_line(error)}",
            f"kvctl benchmark --model {MODEL} --quick --backend {name} shows its log; docs/backends/ its needs",
        )  # fmt: skip
        return
    except Difference as error:
        yield _backends(
            "failed", code, f"{name} {version} moved wrong bytes: {error}",
            "do not use it on this host; memory or driver may be broken",
        )  # fmt: skip
        return
    for warned in found.warnings:
        yield _backends("warning", warned.code, f"{name}: {warned.message}")
    for row in found.rows:
        yield _backends("ok", code, _told(name, version, row))


def _told(name: str, version: str, row: Measurement) -> str:
    over = f" over {row.transport}" if row.transport else ""
    moved = f"{size(row.bytes)} from one process to another{over}, {rate(row.bytes_per_second)}"
    return f"{name} ({version}): {moved}, every byte right"
