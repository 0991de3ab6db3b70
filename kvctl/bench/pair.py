"""Two processes with the memory of a reading worker and of those that it reads from, the latter perhaps elsewhere."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.bench.cases import MovedRequest, to_plain
from kvctl.bench.memory import size_of, with_blocks
from kvctl.bench.process import END_SECONDS, START_SECONDS, introduction, options_at, start, ucx_log
from kvctl.bench.remote import RemoteProcess, ServeTarget, begin, connect
from kvctl.bench.transport import ucx_transport
from kvctl.processes.interruption import held, unwinding
from kvctl.processes.worker_process import WorkerProcess, end_all, good
from kvd.backends.contract import Operation
from kvd.backends.registry import ADAPTERS
from kvd.geometry.codec import worker_to_plain
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.plan import Plan, plan_worker

MOVE_SECONDS = 50.0

MeasuredProcess = WorkerProcess | RemoteProcess


@dataclass(frozen=True)
class PairScene:
    """What takes part: one worker of the reading engine, and those of the other engine that it reads from.

    ``sources`` are all workers of the other engine; ``plan`` says which of them, and its addresses are made up.
    """

    reader: WorkerGeometry
    siblings: tuple[WorkerGeometry, ...]
    sources: tuple[WorkerGeometry, ...]
    plan: Plan

    @property
    def bytes(self) -> int:
        """Memory that both processes take for KV."""
        return size_of(self.reader) + sum(size_of(self.sources[at]) for at in self.plan.sources)


def scene(
    local: EngineGeometry, remote: EngineGeometry, blocks: tuple[int, int], rank: str = ""
) -> PairScene:
    """A worker of the reading engine, the first unless named, with at most so many blocks of it and of the others.

    Raises `TopologyError` where the two do not fit.
    """
    siblings = tuple(with_blocks(worker, blocks[0]) for worker in local.workers)
    sources = tuple(with_blocks(worker, blocks[1]) for worker in remote.workers)
    reader = next(worker for worker in siblings if rank in ("", str(worker.rank)))
    return PairScene(reader, siblings, sources, plan_worker(reader, siblings, sources))


@dataclass(frozen=True)
class BackendRun:
    """A transfer engine and how to run it: the adapter's options, variables of the environment.

    ``devices`` are the CUDA devices that the reader's and the source's memory is on, None for the host's.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class ProcessPair:
    """Both processes, ready to move. ``lands``: writes are possible. The rest is for the ceilings."""

    backend: BackendRun
    reader: WorkerProcess
    source: MeasuredProcess
    lands: bool
    host: str
    port: int
    reader_geometry: dict[str, Any]
    source_geometries: dict[str, dict[str, Any]]
    peer: str
    logs: dict[str, Path]

    def fill(self, requests: Sequence[MovedRequest], key: str) -> None:
        """Put the right bytes into the source's blocks, and none into the reader's."""
        self.source.ask(do="fill", key=key, requests=list(map(to_plain, requests)))
        self.reader.ask(do="clear", requests=list(map(to_plain, requests)))

    def difference(self, requests: Sequence[MovedRequest], key: str) -> str:
        """The first byte that did not land as it must; empty where all did."""
        return str(self.reader.ask(do="check", key=key, requests=list(map(to_plain, requests)))["difference"])

    def move(
        self,
        requests: Sequence[MovedRequest],
        operation: Operation,
        at: Sequence[float] | None = None,
        **how: Any,
    ) -> dict[str, Any]:
        """Move them; see `kvctl.bench.moving.move`."""
        process = self.reader if operation == "read" else self.source
        patience = MOVE_SECONDS + max(at or (0.0,)) + START_SECONDS
        plain = list(map(to_plain, requests))
        return process.ask(patience=patience, do="move", requests=plain, seconds=MOVE_SECONDS, at=at, **how)

    def large(self, operation: Operation, size: int) -> dict[str, Any]:
        """One large transfer with this backend."""
        worker = next(iter(self.source_geometries))
        process, theirs = (
            (self.reader, self.source_geometries[worker])
            if operation == "read"
            else (self.source, self.reader_geometry)
        )
        return process.ask(
            do="raw", worker=worker, theirs=theirs, peer=self.peer, bytes=size, seconds=MOVE_SECONDS
        )

    def memcpy(self, size: int) -> dict[str, Any]:
        """A copy within the reader."""
        return self.reader.ask(do="memcpy", bytes=size)

    def stream(self, size: int) -> dict[str, Any]:
        """A plain TCP stream from the source to the reader."""
        return self.reader.ask(do="stream", host=self.host, port=self.port, bytes=size)

    def transport(self, operation: Operation) -> str:
        """What moved the bytes; empty where the backend does not tell. To be asked when both processes have ended."""
        of_host, of_device = ADAPTERS[self.backend.name].transports
        if told := of_host if self.backend.devices[0] is None else of_device:
            return told
        side = "reader" if operation == "read" else "source"
        if not self.logs[side].exists():  # UCX's, which only NIXL uses
            return ""
        log = self.logs[side].read_text(encoding="utf-8", errors="replace")
        return ucx_transport(log, rf"{side}-\d+\.{operation}\.", operation)


@contextlib.contextmanager
def pair(
    place: PairScene, backend: BackendRun, folder: Path, to: ServeTarget | None = None
) -> Iterator[ProcessPair]:
    """Start both processes, the source on the host ``to`` if there is one; have them register, meet; end them after.

    Raises `WorkerFailed` with the backend's own words, `PeerUnreachable` where the other host does not answer.
    """
    with unwinding() as stack:
        processes: list[MeasuredProcess] = []
        stack.push(functools.partial(end_all, processes, END_SECONDS))
        logs = {name: ucx_log(name, backend.name, folder) for name in ("reader", "source")}
        with held():
            reader = start("reader", backend.name, folder, backend.environment)
            processes.append(reader)
        own = dict(backend.options) | (options_at(backend.name, to.own_address()) if to else {})
        reader.give(
            introduction(
                "reader", backend.name, own, {"0": worker_to_plain(place.reader)}, backend.devices[0]
            )
        )
        source = _source(place, backend, folder, to, processes)
        mine, theirs = (good(process.name, process.answer(START_SECONDS)) for process in (reader, source))
        sources = [worker_to_plain(worker) for worker in place.sources]
        for at, plain in theirs["workers"].items():
            sources[int(at)] = plain
        both: dict[str, Any] = {
            "do": "connect",
            "reader": [mine["workers"]["0"]],
            "siblings": [worker_to_plain(worker) for worker in place.siblings],
            "sources": sources,
        }
        reader.ask(**both, metadata=theirs["metadata"])
        if mine["lands"]:
            windows = reader.ask(do="land", sources=list(theirs["workers"]))["windows"]
            source.ask(**both, windows=windows)
        yield ProcessPair(
            backend=backend,
            reader=reader,
            source=source,
            lands=bool(mine["lands"]),
            host=to.host if to else "127.0.0.1",
            port=int(source.ask(do="listen")["port"]),
            reader_geometry=mine["workers"]["0"],
            source_geometries=theirs["workers"],
            peer=str(place.plan.remote_ranks[place.plan.sources[0]]),
            logs=logs,
        )


def _source(
    place: PairScene,
    backend: BackendRun,
    folder: Path,
    to: ServeTarget | None,
    processes: list[MeasuredProcess],
) -> MeasuredProcess:
    """The source, added to ``processes`` and told who it is."""
    workers = {str(at): worker_to_plain(place.sources[at]) for at in place.plan.sources}
    who = introduction("source", backend.name, backend.options, workers, backend.devices[1])
    if to is not None:
        remote = connect(to, backend.name, ucx_log("source", backend.name, folder))
        processes.append(remote)
        begin(remote, who, dict(backend.environment))
        return remote
    with held():
        source = start("source", backend.name, folder, backend.environment)
        processes.append(source)
    source.give(who)
    return source
