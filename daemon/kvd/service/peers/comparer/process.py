"""The process that compares engines for kvd, so that a card which nobody can plan costs kvd nothing.

A thread cannot be ended, and planning is calls into numpy that look at no clock. Only a process can be given a limit of
time and of memory that holds. kvd starts it with a socket as its standard input (`handle`), and gives it one job after
the other. kvd kills it when one takes too long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
import time

import msgspec

from kvd.client.cards import described_engine
from kvd.geometry.alike import AlikeReader
from kvd.geometry.errors import BadGeometry, GeometryError
from kvd.geometry.model import Axis, EngineGeometry, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.engines.shape import engine_shape
from kvd.service.peers.comparer.exchange import EXCHANGE_SECONDS, KindsRead, find_exchange
from kvd.service.peers.comparer.messages import (
    CPU_SECONDS,
    FRAME,
    MEMORY_BYTES,
    CompareJob,
    CompareSides,
    FindShape,
    Found,
    Side,
)
from kvd.topology import compat, effort
from kvd.topology.errors import TopologyError
from kvd.wire.card_parts import Gathering, with_workers
from kvd.wire.errors import BadCard
from kvd.wire.identity import EngineCard
from kvd.wire.reply import RefusalFactor

MOST_FACTORS = 64
LONGEST_TEXT = 500
NICENESS = 5
"""It gives way to kvd itself, which answers everybody else."""


_JOBS: msgspec.msgpack.Decoder[CompareJob] = msgspec.msgpack.Decoder(CompareJob)


@dataclasses.dataclass(slots=True)
class _SideRead:
    """One side as it comes in."""

    card: EngineCard
    parts: Gathering = dataclasses.field(default_factory=Gathering)
    geometry: EngineGeometry | None = None
    shape: str = ""
    kinds: KindsRead = dataclasses.field(default_factory=KindsRead)
    reader: AlikeReader = dataclasses.field(default_factory=AlikeReader)


def main() -> None:
    """Do jobs until kvd closes the socket."""
    # A limit before anything is imported or read; what kvd itself was given may be lower.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # the shipped unit lets nobody change priorities
        os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # kvd's terminal sends it to both; kvd's end is ours
    rehearse()
    with socket.socket(fileno=0) as kvd, contextlib.suppress(ConnectionError):  # kvd was killed
        _send(kvd, Found())
        serve(kvd)


def serve(kvd: socket.socket) -> None:
    """Take messages and answer them, until there are no more."""
    sides: dict[bool, _SideRead] = {}
    while (data := _receive(kvd)) is not None:
        job = _JOBS.decode(data)
        if isinstance(job, Side):
            if not job.local and not job.part.first:
                # The default of SIGPROF ends the process, whatever it is in the middle of.
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                sides.clear()
            if not job.part.first:
                sides[job.local] = _SideRead(job.card)
            sides[job.local].parts.add(job.card.engine, job.part)
        else:
            _send(kvd, found(job, sides))


def found(job: FindShape | CompareSides, sides: dict[bool, _SideRead]) -> Found:
    """The answer to a question about the sides that are here. What cannot be read is a factor that failed."""
    try:
        peer = _read(sides[False])
        if isinstance(job, FindShape):
            return Found(shape=sides[False].shape)
        sides[True].reader = sides[False].reader  # engines that fit are alike as a rule
        local = _read(sides[True])
        effort.refuse_large(local, peer)
        began = time.process_time()
        factors = compat.compare(local, peer)
        soon = time.process_time() - began < EXCHANGE_SECONDS
    except GeometryError as error:
        return Found(bad=(RefusalFactor("geometry", "readable", _short(f"not readable: {error}"), ok=False),))
    except (BadCard, TopologyError) as error:
        return Found(refusal=_short(str(error)))
    except MemoryError:
        return Found(refusal=f"it takes more than {MEMORY_BYTES >> 20} MiB of memory")
    bad = [
        RefusalFactor(_short(f.name), _short(f.local), _short(f.remote), f.ok, _short(f.note))
        for f in factors
        if not f.ok
    ]
    pushes = sides[True].card.engine.role != "decode"
    exchange = find_exchange(local, peer, sides[False].kinds, pushes=pushes) if soon and not bad else None
    return Found(bad=tuple(bad[:MOST_FACTORS]), exchange=exchange)


def _short(text: str) -> str:
    """A card may name layers and facts as long as it likes."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text)} characters)"


def rehearse() -> None:
    """Compare an engine of one layer with itself: the first time takes milliseconds."""
    axes = (Axis("head", 0, 1, 1, 4), Axis("token", 0, 1, 1, 4))
    page = Page(4, (Field("k", "float32", 4, 0, axes, (("head", 1), ("token", 1))),))
    group = Group(0, "full", 1, (Layer("0", page, region=0, offset=0, stride=4),))
    worker = WorkerGeometry(Rank(), 1, (Region(1, 4),), (group,))
    engine = EngineGeometry("rehearsal", "", "none", 1, 1, 1, (worker,))
    compat.compare(engine, engine)


def _read(side: _SideRead) -> EngineGeometry:
    """The geometry of a side, and with it its shape."""
    if side.geometry is None:
        workers = side.parts.workers
        geometries: list[WorkerGeometry] = []
        shapes: list[tuple[str, str]] = []
        for worker in workers:
            geometry, shape = side.reader.read_document(worker.geometry)
            if geometry.rank != worker.rank:
                raise BadGeometry(f"the card says rank {worker.rank}, its geometry says {geometry.rank}")
            geometries.append(geometry)
            shapes.append((worker.backend, shape))
            side.kinds.add(worker, geometry)
        side.shape = engine_shape(side.card.engine, shapes)
        card = with_workers(side.card, workers)
        engine = msgspec.structs.replace(card.engine, facts=card.facts)
        side.geometry = described_engine(engine, card.generation, tuple(geometries))
    return side.geometry


def _receive(kvd: socket.socket) -> bytes | None:
    size = _exactly(kvd, FRAME)
    return None if size is None else _exactly(kvd, int.from_bytes(size))


def _exactly(kvd: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view, here = memoryview(data), 0
    while here < count:
        if not (taken := kvd.recv_into(view[here:])):
            return None
        here += taken
    return bytes(data)


def _send(kvd: socket.socket, message: Found) -> None:
    data = msgspec.msgpack.encode(message)
    kvd.sendall(len(data).to_bytes(FRAME) + data)


if __name__ == "__main__":
    main()
