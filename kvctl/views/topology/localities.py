"""Where the workers of a host stand: a part of the Topology document, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.screen import Column, ScreenPart, Styled, TextTable, table
from kvctl.views.topology.nearness import ORDER, Nearness, between_workers, to_adapter
from kvd.wire.locality import Locality
from kvd.wire.query import WorkerRow

LEGEND = (
    "  PIX   over one PCIe switch      PHB   over the CPU's PCIe host bridge",
    "  PXB   over several of them      NODE  within a NUMA node      SYS  beyond it",
)


class WorkerLocality(Struct, frozen=True, kw_only=True):
    """Where one worker of this kvd's host stands."""

    worker: Annotated[str, Meta(description="ENGINE/RANK")]
    gpu: Annotated[
        str, Meta(description="what the GPU of its KV memory is called; empty: memory of the host")
    ]
    pci: Annotated[str, Meta(description="that GPU's address on PCI")]
    numa: Annotated[tuple[int, ...], Meta(description="NUMA nodes of its CPUs, of a GPU that one's")]
    cpus: Annotated[str, Meta(description="CPUs that it may run on")]
    adapters: Annotated[
        dict[str, Nearness],
        Meta(description="RDMA adapters of the host, else network cards, and how near each is"),
    ]
    workers: Annotated[
        dict[str, Nearness], Meta(description="other workers, and how near their KV memory is")
    ]


def worker_localities(rows: Sequence[WorkerRow], engine_ids: set[str]) -> tuple[WorkerLocality, ...]:
    """Those of the workers of these engines that told where they stand, engine by engine."""
    told = {
        f"{row.engine_id}/{row.rank}": row.locality
        for row in rows
        if row.locality is not None and row.engine_id in engine_ids and row.state != "gone"
    }
    return tuple(_document(name, stands, told) for name, stands in told.items())


def _document(name: str, stands: Locality, told: dict[str, Locality]) -> WorkerLocality:
    gpu = stands.gpu
    return WorkerLocality(
        worker=name,
        gpu=gpu.name if gpu else "",
        pci=gpu.address if gpu else "",
        numa=(gpu.numa,) if gpu and gpu.numa >= 0 else stands.numa,
        cpus=stands.cpus,
        adapters={one.name: to_adapter(stands, one) for one in stands.adapters},
        workers={other: between_workers(stands, its) for other, its in told.items() if other != name},
    )


def localities_screen(workers: Sequence[WorkerLocality], wide: bool) -> list[ScreenPart]:
    """A worker a line; with ``wide`` also how near each is to each. Workers without GPUs are no news otherwise."""
    if not workers or not (wide or any(worker.gpu for worker in workers)):
        return []
    parts: list[ScreenPart] = [
        "",
        table(
            workers,
            Column("WORKER", lambda w: w.worker),
            Column("GPU", lambda w: w.gpu or "-"),
            Column("PCI", lambda w: w.pci or "-", any(worker.pci for worker in workers)),
            Column("NUMA", lambda w: ",".join(map(str, w.numa)) or "-"),
            Column("CPUS", lambda w: w.cpus or "-"),
            Column("NEAREST ADAPTER", _nearest),
        ),
    ]
    if wide:
        names = [worker.worker for worker in workers]
        adapters = list(dict.fromkeys(name for worker in workers for name in worker.adapters))
        short = {name: f"W{at}" for at, name in enumerate(names)}
        rows = [
            [
                short[worker.worker],
                *({**worker.workers, worker.worker: "X"}[name] for name in names),
                *(worker.adapters.get(name, "-") for name in adapters),
                worker.worker,
            ]
            for worker in workers
        ]
        parts += ["", TextTable(["", *short.values(), *adapters, "WORKER"], rows)]
    return [*parts, *(Styled(line, "dim") for line in LEGEND)]


def _nearest(worker: WorkerLocality) -> str:
    """The adapters that are nearest, and how near."""
    if not worker.adapters:
        return "-"
    best = min(worker.adapters.values(), key=ORDER.index)
    found = [name for name, nearness in worker.adapters.items() if nearness == best]
    return f"{', '.join(found[:2])}{' ...' * (len(found) > 2)} ({best})"
