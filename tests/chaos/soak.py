"""`python -m tests.chaos.soak --minutes 60`: a busy host for a long time, and whether kvd stays as it is.

10,000 workers stay registered at a kvd, and 512 at another; they are heard from each 10 s. 1,000 handshakes a second
ask the one for engines of the other. Each second a few workers leave and come back as new ones on both, so that
generations, cards and links are made anew. RSS, descriptors and threads of both kvds are sampled each second. The exit
status is 1 where one grows. Where open files are too few for so many connections, workers share some.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import selectors
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.service.sockets.limits import connection_counts, share_of
from kvd.wire.frame import Message, encode
from kvd.wire.handshake import GetPeer
from kvd.wire.identity import Endpoint
from kvd.wire.names import SOCKET_NAME
from kvd.wire.registration import Heartbeat, Unregister
from kvd.zmtp.connection import Connection, ConnectionLimits
from kvd.zmtp.events import Received
from kvd.zmtp.null import Null
from tests.support.attacked import Attacker, attacked, attacking
from tests.support.daemons import Daemon, daemons, facts, worker

RANKS, FAR_RANKS = 64, 8
"""Workers of an engine here and of one at the other kvd."""
HEARTBEAT_SECONDS = 10.0
FAR_ENGINES = 64
CHURN, FAR_CHURN = 5, 1
"""Workers a second that leave and come back as new ones: each makes a new generation of its engine."""
WARMING = 6
"""So many times as many in the first part of the run, so that what a kvd remembers of those that went fills in it."""
WAIT_SECONDS = 60.0
KINDS = ("not_registered", "registered", "peer_ready", "peer_gone", "refused", "ok")
TOLD_SECONDS = 60.0
"""How often standard error says how far the run is."""
SPARE = 100
"""Connections that are left to others."""
TICK_SECONDS = 0.01
SETTINGS = {
    "KVD_LIVENESS_HEARTBEAT_SECONDS": f"{HEARTBEAT_SECONDS:g}",
    "KVD_LIVENESS_SILENT_SECONDS": "60",
    "KVD_LIVENESS_GONE_SECONDS": "300",
}
WARM_SHARE = 0.2
"""The first part of the run, in which caches fill, says nothing of growth."""
FLAT_SHARE = 0.05
"""Growth from the end of that to the end of the run, by the line that fits best, of what there was."""
NOISE = {"rss": 4 << 20, "descriptors": 8.0, "threads": 2.0}
"""So much of each is no growth in any run."""


@dataclass(frozen=True)
class Sample:
    """One kvd at one second."""

    rss: float
    descriptors: float
    threads: float


@dataclass(frozen=True)
class Series:
    """One quantity of one kvd over the run: when it was warm, at the end, at most, and how much it grew in between."""

    name: str
    first: float
    last: float
    most: float
    grown: float
    flat: bool


class Worker:
    """One worker's connection, or that of a few."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self.zmtp = Connection("DEALER", Null(), ConnectionLimits(message=64 << 20))
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(WAIT_SECONDS)
        self.stream.connect(str(directory / SOCKET_NAME))
        self.stream.sendall(self.zmtp.start())
        while not self.zmtp.ready:
            self.take(self.stream.recv(4096))

    def take(self, data: bytes) -> list[bytes]:
        """The messages in what came."""
        found = [event.body for event in self.zmtp.receive(data) if isinstance(event, Received)]
        if answer := self.zmtp.outgoing():
            self.stream.sendall(answer)
        return found

    def send(self, message: Message, correlation: int) -> None:
        """Send it, waiting where kvd does not read."""
        self.stream.sendall(b"".join(self.zmtp.message(encode(message, correlation))))


class Crowd:
    """Workers of this process at one kvd, each with a connection of its own, as sessions have."""

    def __init__(self, directory: Path, name: str, workers: int, ranks: int) -> None:
        self.ranks = ranks
        self.places = [(f"{name}{number // ranks}", number % ranks) for number in range(workers)]
        connections = min(workers, share_of(connection_counts().local) - SPARE)
        self.workers = [Worker(directory, number) for number in range(connections)]
        self.incarnations = [""] * workers
        self.answers: Counter[str] = Counter()
        self._ready = selectors.DefaultSelector()
        for one in self.workers:
            self._ready.register(one.stream, selectors.EVENT_READ, one)
        self._beat = 0.0
        self._id = 0

    def register(self, number: int) -> None:
        """A new worker takes its place; an older one says goodbye."""
        if self.incarnations[number]:
            self.send(number, Unregister(incarnation=self.incarnations[number]))
        engine, rank = self.places[number]
        card = worker(facts(engine, tp=self.ranks), rank)
        self.incarnations[number] = card.card.incarnation
        self.send(number, card)

    def register_all(self) -> None:
        """All of them, and their answers."""
        for number in range(len(self.places)):
            self.register(number)
            self.read(0.0)
        ends = time.monotonic() + WAIT_SECONDS
        while self.answers["registered"] < len(self.places) and time.monotonic() < ends:
            self.read(0.1)

    def send(self, number: int, message: Message) -> None:
        """On the connection of that worker."""
        self._id += 1
        self.workers[number % len(self.workers)].send(message, self._id)

    def beat(self, seconds: float) -> None:
        """The heartbeats that are due after so many seconds."""
        at = self._beat
        self._beat += seconds * len(self.places) / HEARTBEAT_SECONDS
        for number in range(int(at), int(self._beat)):
            place = number % len(self.places)
            self.send(place, Heartbeat(incarnation=self.incarnations[place]))

    def read(self, seconds: float) -> None:
        """Count the answers that are there, waiting so long for a first one; what comes unasked is "pushed"."""
        for key, _ in self._ready.select(seconds):
            data = key.data.stream.recv(1 << 18)
            if not data:
                raise EOFError(f"kvd closed the connection of worker {key.data.number}")
            for body in key.data.take(data):
                # A frame is [version, correlation, message]: a large card need not be decoded for its kind.
                pushed = body[2:3] == b"\0"
                kind = next((kind for kind in KINDS if kind.encode() in body[:64]), "other")
                self.answers["pushed" if pushed else kind] += 1


def busy(
    near: Path, far: Path, endpoint: tuple[str, int], workers: int, rate: int, report: Path, warm: float
) -> None:
    """All clients of both kvds, until it is ended; kvds are warm after ``warm`` seconds."""
    dice = random.Random(1)
    here = Crowd(near, "near", workers, RANKS)
    there = Crowd(far, "far", FAR_ENGINES * FAR_RANKS, FAR_RANKS)
    for crowd in (there, here):
        crowd.register_all()
    asked, began = 0, time.monotonic()
    last = told = began
    while True:
        now = time.monotonic()
        due = int((now - began) * rate)
        for _ in range(asked, due):
            _shake_hands(here, dice.randrange(workers), endpoint)
        asked = due
        for crowd, churn in ((here, CHURN), (there, FAR_CHURN)):
            crowd.beat(now - last)
            crowd.read(TICK_SECONDS / 2)
            if now - told > 1.0:
                for _ in range(churn * (WARMING if now - began < warm else 1)):
                    crowd.register(dice.randrange(len(crowd.places)))
        last = now
        if now - told > 1.0:
            told = now
            counts = {"asked": asked, "seconds": now - began, **here.answers}
            report.with_suffix(".new").write_text(json.dumps(counts))
            report.with_suffix(".new").replace(report)


def _shake_hands(crowd: Crowd, number: int, endpoint: tuple[str, int]) -> None:
    engine = number // RANKS
    far = f"far{engine % FAR_ENGINES}"
    crowd.send(number, GetPeer(local_engine=f"near{engine}", engine_id=far, endpoint=Endpoint(*endpoint)))


def sample(kvd: Daemon) -> Sample:
    """What a kvd has now."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{kvd.pid}/status").read_text().splitlines() if ":" in line
    )
    descriptors = len(list(Path(f"/proc/{kvd.pid}/fd").iterdir()))
    return Sample(int(status["VmRSS"].split()[0]) << 10, descriptors, int(status["Threads"]))


def judged(name: str, values: Sequence[float], noise: float) -> Series:
    """Whether a quantity stays as it is: the line of least squares through its values once it is warm."""
    warm = values[int(len(values) * WARM_SHARE) :]
    middle = (len(warm) - 1) / 2
    mean = sum(warm) / len(warm)
    spread = sum((at - middle) ** 2 for at in range(len(warm))) or 1.0
    slope = sum((at - middle) * (value - mean) for at, value in enumerate(warm)) / spread
    grown = slope * (len(warm) - 1)
    return Series(name, warm[0], values[-1], max(values), grown, grown <= max(noise, FLAT_SHARE * mean))


def soak(seconds: float, workers: int, rate: int) -> bool:
    """The run; True where nothing grew, and clients were answered."""
    with tempfile.TemporaryDirectory() as folder, daemons(2) as kvds:
        for kvd in kvds:
            kvd.kill()
            kvd.environment = SETTINGS
            kvd.start()
        near, far = kvds
        report = Path(folder, "report")
        at = (
            near.directory,
            far.directory,
            ("127.0.0.1", far.port),
            workers,
            rate,
            report,
            seconds * WARM_SHARE,
        )
        with attacking(busy, *at) as clients, attacked(near) as watch:
            samples = _samples(clients, report, kvds, seconds)
            verdict = watch.verdict()
        counts = json.loads(report.read_text())
    series = [
        judged(f"{kvd} {name}", [getattr(found, name) for found in samples[number]], NOISE[name])
        for number, kvd in enumerate(("near", "far"))
        for name in NOISE
    ]
    done = counts.get("peer_ready", 0)
    sys.stdout.write(
        f"{workers} workers, {counts['asked'] / counts['seconds']:.0f} handshakes/s asked, "
        f"{done / counts['seconds']:.0f}/s made, for {counts['seconds']:.0f} s\n"
        f"another client: {verdict}\nanswers: {counts}\n\n"
        "| | when warm | at the end | at most | grown | |\n|---|---|---|---|---|---|\n"
    )
    for one in series:
        unit = 1 << 20 if one.name.endswith("rss") else 1
        figures = " | ".join(f"{value / unit:.1f}" for value in (one.first, one.last, one.most, one.grown))
        sys.stdout.write(f"| {one.name} | {figures} | {'flat' if one.flat else 'GROWS'} |\n")
    return all(one.flat for one in series) and verdict.alive and done > 0.95 * counts["asked"]


def _samples(clients: Attacker, report: Path, kvds: list[Daemon], seconds: float) -> list[list[Sample]]:
    while not report.exists():
        assert not clients.wait(0.1), "the clients ended"
    samples: list[list[Sample]] = [[] for _ in kvds]
    began = told = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        for found, kvd in zip(samples, kvds, strict=True):
            found.append(sample(kvd))
        if now - told >= TOLD_SECONDS:
            told = now
            near, far = (found[-1].rss / 2**20 for found in samples)
            sys.stderr.write(f"{(now - began) / 60:3.0f} min: near {near:.1f} MiB, far {far:.1f} MiB\n")
        assert not clients.wait(1.0), "the clients ended"
    return samples


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=10_048, help="a multiple of 64 (10048)")
    parser.add_argument("--rate", type=int, default=1000, help="handshakes a second")
    given = parser.parse_args(arguments)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # which kvd does too
    return 0 if soak(given.minutes * 60, given.workers, given.rate) else 1


if __name__ == "__main__":
    sys.exit(main())
