"""The largest engine: registered, described to another kvd, and handed to a worker there; seconds, bytes, and a limit.

    python benchmarks/large_cards.py [--ranks 4096] [--layers-as-regions] [--readers 8] [--rounds 3] [--json]

The engine is a Llama-3.1-70B of so many tensor parallel ranks: 80 layers on each. Its workers are sockets of this
process, which present cards with transfer metadata of usual size. A worker of a reading engine beside another kvd then
asks for the engine, part by part. `--layers-as-regions` gives each layer a region of memory of its own, which makes
cards three times as large.

The limit is the same bytes without kvd: each message encoded, sent through a Unix socket and decoded, once for each way
that it goes. Processor time is that of both kvds and their comparing processes.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import zmq

from kvctl.bench.handshake import card_of, processor_seconds
from kvctl.engines.cards import engine_facts
from kvctl.engines.sources import planned
from kvctl.processes.daemons import Kvd, two_hosts
from kvd.client.packing import packed
from kvd.geometry.model import EngineGeometry, Group, Region, WorkerGeometry
from kvd.wire.card_parts import Gathering
from kvd.wire.frame import Message, decode, encode
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint
from kvd.wire.names import socket_address
from kvd.wire.query import GetStatus, KvdStatus
from kvd.wire.registration import Registered, RegisterWorker

MODEL = "llama-3.1-70b"
SECONDS = 60.0
BATCH = 64
"""Sockets that connect at a time."""


@dataclass
class Round:
    """Seconds and bytes of one round; the longest turns of the two loops in seconds."""

    registered: float
    handed: float
    warm: float
    registered_bytes: int
    handed_bytes: int
    processor: float
    limit: float
    turns: tuple[float, float]
    busiest: tuple[float, float]


def with_regions(worker: WorkerGeometry) -> WorkerGeometry:
    """The worker with a region for each layer, as engines have that allocate layer by layer."""
    (whole,) = worker.regions
    layers = [layer for group in worker.groups for layer in group.layers]
    part = whole.length // len(layers)
    groups: list[Group] = []
    for group in worker.groups:
        moved = tuple(
            dataclasses.replace(layer, region=number, offset=0) for number, layer in enumerate(group.layers)
        )
        groups.append(dataclasses.replace(group, layers=moved))
    regions = tuple(Region(whole.address + number * part, part, "cuda:0") for number in range(len(layers)))
    return dataclasses.replace(worker, regions=regions, groups=tuple(groups))


def cards_of(engine: EngineGeometry, name: str, role: str) -> list[RegisterWorker]:
    """What its workers present."""
    facts = msgspec.structs.replace(
        engine_facts(dataclasses.replace(engine, engine_id=name), "both"),
        role="prefill" if role == "prefill" else "decode",
    )
    return [RegisterWorker(card_of(worker, facts), parts=True) for worker in engine.workers]


class Workers:
    """Sockets of workers at one kvd."""

    def __init__(self, kvd: Kvd, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 16)
        self.sockets = []
        for number in range(count):
            opened = self._context.socket(zmq.DEALER)
            opened.linger = 0
            opened.connect(socket_address(kvd.directory))
            opened.send(encode(GetStatus(), 1))
            self.sockets.append(opened)
            if not (number + 1) % BATCH or number + 1 == count:
                for opened in self.sockets[number // BATCH * BATCH :]:  # each is connected
                    _answer(opened)

    def register(self, frames: list[bytes]) -> str:
        """Present all cards; the generation of the engine when all have been taken."""
        for opened, frame in zip(self.sockets, frames, strict=True):
            opened.send(frame)
        generation = ""
        for opened in self.sockets:
            while not isinstance(answer := _answer(opened), Registered):
                pass
            generation = answer.engine_generation or generation
        return generation

    def close(self) -> None:
        """Close all."""
        self._context.destroy(linger=0)


def _answer(opened: zmq.Socket[bytes]) -> Message:
    if not opened.poll(int(1000 * SECONDS)):
        raise SystemExit("kvd did not answer")
    return decode(opened.recv())[0]


def handed(opened: zmq.Socket[bytes], question: GetPeer) -> tuple[float, list[bytes]]:
    """Seconds until all parts of the card are here, and the frames that brought them."""
    gathering, frames = Gathering(), []
    began = time.perf_counter()
    while True:
        opened.send(encode(msgspec.structs.replace(question, first=gathering.count), 7))
        while True:
            if not opened.poll(int(1000 * SECONDS)):
                raise SystemExit("kvd did not answer")
            frame = opened.recv()
            answer, correlation = decode(frame)
            if correlation == 7:
                break
        if not isinstance(answer, PeerReady) or answer.part is None:
            raise SystemExit(f"kvd answered {answer}")
        frames.append(frame)
        if gathering.add(answer.peer.engine, answer.part):
            return time.perf_counter() - began, frames


def limit_of(frames: list[bytes]) -> float:
    """Seconds for the same messages without kvd: encoded, sent through a socket, decoded."""
    messages = [decode(frame)[0] for frame in frames]
    ours, theirs = socket.socketpair()

    def drain() -> None:
        while theirs.recv(1 << 20):
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    began = time.perf_counter()
    for message in messages:
        frame = encode(message, 1)
        ours.sendall(frame)
        decode(frame)
    ours.close()
    reader.join()
    theirs.close()
    return time.perf_counter() - began


def status(kvd: Kvd) -> KvdStatus:
    """How a kvd is."""
    answer = kvd.ask(GetStatus())
    if not isinstance(answer, KvdStatus):
        raise SystemExit(f"kvd answered {answer}")
    return answer


def one_round(large: EngineGeometry, reader: EngineGeometry, folder: Path) -> Round:
    """Everything once, with kvds that have just started."""
    with two_hosts(folder) as (far, near):
        frames = [encode(packed(card), 2) for card in cards_of(large, "large", "prefill")]
        workers = Workers(far, len(frames))
        readers = Workers(near, len(reader.workers))
        readers.register([encode(card, 2) for card in cards_of(reader, "reader", "decode")])
        for kvd in (far, near):
            while not status(kvd).gauges["handshakes.prepared"]:
                time.sleep(0.05)
        pids = [kvd.process.pid for kvd in (far, near)]
        spent = processor_seconds(pids)
        began = time.perf_counter()
        generation = workers.register(frames)
        registered = time.perf_counter() - began
        endpoint = status(far).endpoint
        question = GetPeer(
            local_engine="reader",
            engine_id="large",
            endpoint=Endpoint(endpoint.host, endpoint.port),
            generation=generation,
        )
        seconds, told = handed(readers.sockets[0], question)
        spent = processor_seconds(pids) - spent
        warm, _ = handed(readers.sockets[-1], question)
        turns = [status(kvd).gauges for kvd in (far, near)]
        found = Round(
            registered=registered,
            handed=seconds,
            warm=warm,
            registered_bytes=sum(map(len, frames)),
            handed_bytes=2 * sum(map(len, told)),  # from kvd to kvd, and from there to the worker
            processor=spent,
            limit=limit_of(frames) + 2 * limit_of(told),
            turns=(turns[0]["loop.longest_turn_seconds"], turns[1]["loop.longest_turn_seconds"]),
            busiest=(turns[0]["loop.busiest_turn_seconds"], turns[1]["loop.busiest_turn_seconds"]),
        )
        workers.close()
        readers.close()
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--layers-as-regions", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    large, reader = (planned(MODEL, f"tp={ranks}") for ranks in (given.ranks, given.readers))
    if given.layers_as_regions:
        large = dataclasses.replace(large, workers=tuple(map(with_regions, large.workers)))
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        rounds = [one_round(large, reader, Path(folder) / str(n)) for n in range(given.rounds)]
    if given.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(found) for found in rounds]) + "\n")
        return
    middle = {
        name: median(getattr(found, name) for found in rounds) for name in ("registered", "handed", "warm")
    }
    one = rounds[0]
    whole = median(found.registered + found.handed for found in rounds)
    sys.stdout.write(
        f"{given.ranks} ranks x 80 layers, {given.readers} readers, medians of {given.rounds}:\n"
        f"  registered   {middle['registered']:.2f} s, {one.registered_bytes / 1e6:.1f} MB\n"
        f"  handed over  {middle['handed']:.2f} s, {one.handed_bytes / 1e6:.1f} MB; to another rank"
        f" {middle['warm']:.2f} s\n"
        f"  together     {whole:.2f} s; processor time of the kvds {median(f.processor for f in rounds):.2f} s\n"
        f"  the same messages without kvd {median(f.limit for f in rounds):.2f} s\n"
        f"  longest turns of the loops {[f'{1000 * max(f.turns):.0f} ms' for f in rounds]},"
        f" in processor time {[f'{1000 * max(f.busiest):.0f} ms' for f in rounds]}\n"
    )


if __name__ == "__main__":
    main()
