"""A whole `kvctl benchmark --handshake`: measures one pair of engines after the other, shows what it found."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvctl.bench.handshake import CASES, HandshakeCase, Waits, measure
from kvctl.bench.run import failed, progress, workplace
from kvctl.cli.settings import Settings
from kvctl.errors import CheckFailed
from kvctl.processes.errors import DaemonStartFailed, WorkerFailed
from kvctl.views.measuring.benchmark import HandshakeBenchmark, HandshakeMeasurement, quantiles
from kvctl.views.output import show
from kvctl.views.registry import moment

if TYPE_CHECKING:
    from kvd.geometry.model import EngineGeometry

    GeometryPair = tuple[EngineGeometry, EngineGeometry]


def run(pairs: Sequence[GeometryPair], rounds: int, settings: Settings) -> None:
    """Measure and show. Raises `CheckFailed` where a kvd does not start or does not answer."""
    began, load = time.time(), os.getloadavg()[0]
    rows: list[HandshakeMeasurement] = []
    with workplace() as folder, progress(rounds * len(pairs), settings) as told:
        for pair in pairs:
            sizes = f"{len(pair[0].workers)} x {len(pair[1].workers)} ranks"
            try:
                rows += measurements(pair, measure(pair, rounds, folder, lambda what=sizes: told(what)))  # type: ignore[misc]
            except WorkerFailed as error:
                raise failed(error) from None
            except DaemonStartFailed as error:
                raise CheckFailed(str(error), "see docs/handshake.md") from None
    show(
        HandshakeBenchmark(
            model=pairs[0][0].model,
            cores=os.cpu_count() or 1,
            load=load,
            started=moment(began),
            seconds=time.time() - began,
            measurements=tuple(rows),
        ),
        settings,
    )


def measurements(pair: GeometryPair, found: Mapping[HandshakeCase, Waits]) -> Iterator[HandshakeMeasurement]:
    """A row for each case."""
    for case in CASES:
        waits = found[case]
        whole = quantiles(waits.whole)
        yield HandshakeMeasurement(
            local_ranks=len(pair[0].workers),
            remote_ranks=len(pair[1].workers),
            case=case,
            rounds=len(waits.whole),
            each=quantiles(waits.each),
            whole=whole,
            processor_seconds=quantiles(waits.processor).p50,
            handshakes_per_second=len(pair[0].workers) / whole.p50,
            bytes=waits.bytes,
        )
