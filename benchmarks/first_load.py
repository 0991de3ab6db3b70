"""What the first load from a peer takes, over later ones: with the probe that a decoder makes, and without.

    python benchmarks/first_load.py [--backend nixl] [--rounds 5] [--blocks 32] [--json]

Two processes: one holds the memory that is read, the other has the lane of a decoding worker
(`kvd.worker.pull.reader`), which learns of the peer and is left alone until nothing
more happens. Both are new for each round, so that the libraries'
own first steps count. A load is of scattered blocks, all layers. Ratios are taken within a round;
those of the least times of all rounds tell more on a busy machine.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvd.backends.contract import Backend
from kvd.backends.direct import memfd as direct_memory
from kvd.backends.registry import open_backend
from kvd.client.cards import CardReader
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, EngineGeometry, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.topology.rate import Probed
from kvd.topology.transfer_topology import RemoteEngine, TransferTopology
from kvd.wire.card_parts import ToldCard
from kvd.wire.identity import EngineCard, EngineFacts, WorkerCard
from kvd.worker.load import Load, load_of
from kvd.worker.orders import LoadOrder
from kvd.worker.peers.followed import register
from kvd.worker.pull.reader import PullThread
from kvd.worker.remote import RemotePrefill

TOKENS, LAYERS, BLOCKS = 16, 16, 256
"""Tokens of a block, layers, and blocks of each side."""
PAGE = 32 << 10
"""Bytes of a page."""
LATER = 9
"""Loads that the first one is held against."""
SETTLE = 60.0
"""Seconds in which a lane must have come to rest."""


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds from the order to the end: of the first load, and the middle of those after it."""

    first: float
    later: float


def cache(kind: str, name: str) -> tuple[Backend, WorkerGeometry, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """A worker's registered memory, allocated as the connector would have it."""
    size = LAYERS * BLOCKS * PAGE
    own = kind in ("direct", "auto")
    memory = np.frombuffer(direct_memory.memfd(name, size), np.uint8) if own else np.zeros(size, np.uint8)
    axes = (
        Axis("head", 0, 1, 1, PAGE),
        Axis("token", 0, TOKENS, 1, PAGE // TOKENS),
        Axis("dim", 0, PAGE // TOKENS // 2, 1, 2),
    )
    shape = (("head", 1), ("token", TOKENS), ("dim", PAGE // TOKENS // 2))
    page = Page(PAGE, (Field("k", "bfloat16", 2, 0, axes, shape),))
    layers = tuple(Layer(f"l{n}", page, 0, n * BLOCKS * PAGE, PAGE) for n in range(LAYERS))
    geometry = WorkerGeometry(
        Rank(), BLOCKS, (Region(memory.ctypes.data, size),), (Group(0, "full", TOKENS, layers),)
    )
    memory[:] = 1  # pages that nobody touched yet are the kernel's cost, and a GPU has none
    backend = open_backend(kind, name, {})
    backend.register(geometry.regions)
    return backend, geometry, memory


def serve(kind: str, pipe: Connection) -> None:
    """The prefilling worker: registered memory, until it is told to end."""
    backend, geometry, memory = cache(kind, "p")
    memory[:] = 7
    pipe.send((encode_worker(geometry), backend.metadata()))
    pipe.recv()
    backend.close()


def read(kind: str, probe: bool, blocks: int, pipe: Connection) -> None:
    """The decoding worker: learns of the peer, then loads."""
    backend, geometry, memory = cache(kind, "d")
    encoded, metadata = pipe.recv()
    facts = EngineFacts(engine_id="p", model="m")
    worker = WorkerCard(
        engine=facts,
        rank=Rank(0),
        incarnation="i",
        pid=os.getpid(),
        host="h",
        backend=kind,
        geometry=encoded,
        metadata=metadata,
    )
    ended: queue.Queue[Load] = queue.Queue()

    probed = threading.Event()

    def told(_peer: RemoteEngine, _backend: str, _results: list[Probed]) -> None:
        probed.set()

    topology = TransferTopology(EngineGeometry("d", "", "m", 1, 1, 1, (geometry,)), geometry.rank)
    lane = PullThread("p", backend, topology, ended.put, probed=told if probe else None)
    register(topology, ToldCard(EngineCard(engine=facts, generation="g", workers=(worker,))), CardReader())
    lane.on_peer_changed()
    if probe and not probed.wait(SETTLE):
        raise SystemExit("the probe has not ended")
    until = time.monotonic() + SETTLE
    while (lane.lanes.now is None or lane._activity.now) and time.monotonic() < until:  # noqa: SLF001 - it tells nobody else
        time.sleep(0.01)
    blocks_of = memory.reshape(LAYERS, BLOCKS, PAGE)
    if probe and not (blocks_of[:, 0] == 7).all():
        raise SystemExit("the probe did not read the null block")
    if not (blocks_of[:, 1:] == 1).all():
        raise SystemExit("something was read before there was a load")
    chosen = np.random.default_rng(0).permutation(np.arange(1, BLOCKS))[:blocks].tolist()
    times = []
    for number in range(1 + LATER):
        prefill = RemotePrefill(
            engine_id="p", request_id="r", generation="g", host="h", port=1, tokens=blocks * TOKENS,
            blocks=(tuple(chosen),), first_blocks=(0,), lease_seconds=60.0, lease_opened=0.0,
        )  # fmt: skip
        now = time.monotonic()
        order = LoadOrder(f"r{number}", prefill, {0: (0, tuple(chosen))}, blocks * TOKENS, 60.0, now)
        lane.begin(load_of(order, now))
        load = ended.get(timeout=SETTLE)
        if load.cause:
            raise SystemExit(load.cause)
        times.append(load.times.ended - now)
        time.sleep(0.02)
    if not (blocks_of[:, chosen] == 7).all():
        raise SystemExit("other bytes came than were there")
    pipe.send(Round(times[0], statistics.median(times[1:])))
    lane.stop()
    lane.join(10.0)
    backend.close()


def measure(kind: str, *, probe: bool, blocks: int) -> Round:
    """One round."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ours_too, theirs_too = context.Pipe()
    serving = context.Process(target=serve, args=(kind, theirs))
    reading = context.Process(target=read, args=(kind, probe, blocks, theirs_too))
    try:
        serving.start()
        reading.start()
        ours_too.send(ours.recv())
        if not ours_too.poll(3 * SETTLE):
            raise SystemExit("the reading process gave no answer")
        found: Round = ours_too.recv()
        ours.send(None)
        for process in (reading, serving):
            process.join(SETTLE)
        return found
    finally:
        for process in (reading, serving):
            if process.is_alive():
                process.kill()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backend", default="nixl,mooncake,direct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=32, help=f"of a load, at most {BLOCKS - 1}")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds")
    options = parser.parse_args()
    rows = []
    for kind in options.backend.split(","):
        found: dict[bool, list[Round]] = {False: [], True: []}
        for _ in range(options.rounds):
            for probe, rounds in found.items():
                rounds.append(measure(kind, probe=probe, blocks=options.blocks))
        for probe, rounds in found.items():
            rows.append(
                {
                    "backend": kind,
                    "probe": probe,
                    "first_s": statistics.median(r.first for r in rounds),
                    "later_s": statistics.median(r.later for r in rounds),
                    "ratio": statistics.median(r.first / r.later for r in rounds),
                    "least_ratio": min(r.first for r in rounds) / min(r.later for r in rounds),
                }
            )
            if not options.json:
                row = rows[-1]
                sys.stdout.write(
                    f"{kind:9} {'probed' if probe else 'not probed':11} first {row['first_s'] * 1e3:7.2f} ms, later"
                    f" {row['later_s'] * 1e3:7.2f} ms, ratio {row['ratio']:.2f}, of the least"
                    f" {row['least_ratio']:.2f}\n"
                )
                sys.stdout.flush()
    if options.json:
        json.dump({"load": os.getloadavg()[0], "blocks": options.blocks, "rows": rows}, sys.stdout)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
