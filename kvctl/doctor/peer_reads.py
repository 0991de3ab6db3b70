"""Whether bytes of a worker on another host really come here, over what and how fast: some of it is read.

It is the worker's null block, which is no request's and holds zeros: workers read it from each other when they meet
(`kvd.worker.peers.probe`). Where its rows are too short to tell a rate they are read all the same.
"""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import NamedTuple

from kvctl.bench.process import END_SECONDS, START_SECONDS, options_at
from kvctl.bench.run import first_line, workplace
from kvctl.bench.transport import ucx_environment, ucx_transport
from kvctl.cli.numbers import rate, size, span
from kvctl.doctor.peer_reader import LANE
from kvctl.ledger.statistics import quantile
from kvctl.processes.errors import WorkerFailed
from kvctl.processes.worker_process import start_worker
from kvd.backends.registry import ADAPTERS, available
from kvd.geometry.codec import decode_worker
from kvd.topology.copies import Copies
from kvd.topology.descriptors import Descriptors
from kvd.topology.plan import plan_worker
from kvd.wire.identity import WorkerCard
from kvd.worker.peers.probe import null_reads, sample

SECONDS = 10.0
"""For one read, the connection included."""
LONGEST = 4096
"""Rows that are read at most."""


class ReadFrom(NamedTuple):
    """A worker to read from: over which engine, with what it told of itself for that one."""

    engine: str
    protocol: str
    metadata: bytes
    worker: WorkerCard


class PeerRead(NamedTuple):
    """What came of it: ``told`` in words. With ``failed`` no byte came; else it was read, or was not tried."""

    told: str
    failed: bool = False


def read_from(source: ReadFrom, address: str) -> PeerRead:
    """Read the worker's null block; ``address`` is where that host reaches this one."""
    state = available().get(source.engine, "not known here")
    if state.startswith("not "):
        return PeerRead(f"not probed: {source.engine} is {state.partition(':')[0]} where kvctl runs")
    rows = null_block(source.worker)
    if not len(rows):
        return PeerRead("not probed: it has no block")
    options = options_at(source.engine, address) | ({"protocol": source.protocol} if source.protocol else {})
    with workplace() as folder:
        log = folder / "ucx.log"
        process = start_worker(
            f"a reader with {source.engine}",
            "kvctl.doctor.peer_reader",
            folder / "reader.log",
            ucx_environment(log),
        )
        try:
            process.ask(
                patience=START_SECONDS,
                backend=source.engine,
                options=options,
                worker=str(source.worker.rank),
                metadata=b64encode(source.metadata).decode(),
                remote=rows.remote.tolist(),
                length=rows.length.tolist(),
            )
            first, *others = process.ask(patience=10 * SECONDS, do="read", seconds=SECONDS)["seconds"]
        except WorkerFailed as error:
            return PeerRead(first_line(error), failed=True)
        finally:
            process.dismiss()
            process.end(END_SECONDS)
        return PeerRead(_told(source, rows, first, quantile(others, 0.5), _transport(source, log)))


def null_block(worker: WorkerCard) -> Descriptors:
    """Rows of block 0 of all layers of a worker; only ``remote`` and ``length`` mean anything."""
    geometry = decode_worker(worker.geometry)
    plan = plan_worker(geometry, [geometry], [geometry])
    measured = sample(plan, 0)
    found = measured.full if measured else next(null_reads(plan, 0, selection=False), Copies()).descriptors
    return Descriptors(found.local[:LONGEST], found.remote[:LONGEST], found.length[:LONGEST])


def _transport(source: ReadFrom, log: Path) -> str:
    if source.engine == "nixl":
        return ucx_transport(log.read_text(errors="replace"), LANE, "read") if log.exists() else ""
    return source.protocol or ADAPTERS[source.engine].transports[0]


def _told(source: ReadFrom, rows: Descriptors, first: float, usual: float, transport: str) -> str:
    over = f" over {transport}" if transport else ""
    moved = f"{size(rows.nbytes)} of {source.worker.engine.engine_id}/{source.worker.rank}"
    return f"read {moved}{over}, {rate(rows.nbytes / usual)}; the first took {span(first)}"
