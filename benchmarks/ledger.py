"""What a million recorded transfers do to kvd: its memory, its answers to workers and to kvctl, and after a SIGKILL.

    python benchmarks/ledger.py [--rows 1000000] [--rate 500] [--blocks 120] [--seconds 1.0] [--json]

Two real kvds, one with a full ledger and one with an empty one, with the same reports coming to both at the same time.
A worker's heartbeats go to both, one to each every few milliseconds in random order, so that whatever else the machine
does falls on both alike. Blocks in which records come take turns with blocks in which as many messages come that
record nothing. What counts is the ratio of the two kvds' quantiles over all replies, with an interval: it is taken
again from blocks drawn at random (a bootstrap), since replies of one moment have one cause.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zmq

from kvd.client.operator import connect
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.run import LEDGER_NAME
from kvd.wire.frame import decode, encode
from kvd.wire.identity import EngineFacts, WorkerCard
from kvd.wire.query import GetStatus
from kvd.wire.registration import Heartbeat, NotRegistered, RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok
from kvd.wire.transfer import BlockRuns, GroupShare, ReportTransfers, TransferRecord

BATCH = 100
"""Records of one report while the ledger is filled."""
WINDOW = 8
"""Reports that wait for their answer at a time."""
START_SECONDS = 60.0
PROBE_SECONDS = 0.002
DRAWS = 400
STAGES = ("queued", "handshake", "plan", "post", "wire")


@dataclass
class Kvd:
    """A kvd in a directory of its own."""

    directory: Path
    rows: int
    process: subprocess.Popen[bytes] | None = None
    log: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process is not None  # noqa: S101 - it was started
        return self.process.pid

    @property
    def ledger(self) -> Path:
        """Its database."""
        return self.directory / "state" / LEDGER_NAME

    def start(self) -> float:
        """Start it; the seconds until it answers."""
        began = time.monotonic()
        config = self.directory.with_suffix(".yaml")
        config.write_text(f"ledger:\n  max_rows: {self.rows}\n  max_bytes: {64 << 30}\n")
        with self.directory.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvd.service", "--config", str(config)),
                    *("--runtime-dir", str(self.directory)),
                ],
                stdout=log,
                stderr=log,
            )
        while True:
            with contextlib.suppress(Exception), connect(self.directory, 1.0) as operator:
                operator.ask(GetStatus())
                return time.monotonic() - began
            if time.monotonic() - began > START_SECONDS or self.process.poll() is not None:
                sys.exit(self.directory.with_suffix(".log").read_text())
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def megabytes(self) -> float:
        """Its memory that is its own: resident, without mapped files."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
        return 0.0


class Reporter:
    """A worker's end of the wire, several reports at a time; ``acknowledged`` are the transfers that are on disk."""

    def __init__(self, directory: Path) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{directory / 'kvd.sock'}")
        self.waiting: dict[int, list[str]] = {}
        self.acknowledged: list[str] = []
        self.count = 0
        self.engine_id = f"decode-{uuid.uuid4().hex[:8]}"
        self.socket.send(encode(RegisterWorker(self._card()), 0))

    def _card(self) -> WorkerCard:
        """The worker that the records are of: kvd takes no others from this process."""
        axes = (Axis("token", 0, 16, 1, 4),)
        page = Page(64, (Field("k", "float32", 4, 0, axes, (("token", 16),)),))
        layers = (Layer("layer", page, region=0, offset=0, stride=64),)
        geometry = WorkerGeometry(Rank(), 8, (Region(0x10000, 512),), (Group(0, "full", 16, layers),))
        return WorkerCard(
            engine=EngineFacts(engine_id=self.engine_id, model="none"),
            rank=Rank(),
            incarnation=self.engine_id,
            pid=os.getpid(),
            host="bench",
            backend="nixl",
            geometry=encode_worker(geometry),
            metadata=b"",
        )

    def report(self, records: tuple[TransferRecord, ...]) -> None:
        """Send, without waiting for the answer."""
        records = tuple(msgspec.structs.replace(r, local_engine=self.engine_id) for r in records)
        self.count += 1
        self.waiting[self.count] = [r.transfer_id for r in records]
        self.socket.send(encode(ReportTransfers(incarnation=self.engine_id, records=records), self.count))

    def take(self, milliseconds: int) -> bool:
        """Take one answer, if one comes in that time."""
        if not self.socket.poll(milliseconds):
            return False
        answer, correlation = decode(self.socket.recv())
        if isinstance(answer, Ok):
            self.acknowledged += self.waiting.pop(correlation)
        elif correlation == 0:
            pass  # what every worker is told
        elif not isinstance(answer, NotRegistered):
            raise TypeError(f"kvd answered {answer}")
        return True


def record(number: int) -> TransferRecord:
    """A transfer as a busy decoder has them: 64 blocks in a dozen runs on each side."""
    name = uuid.uuid4().hex
    return msgspec.structs.replace(
        _samples()[number % 1000],
        transfer_id=f"cmpl-{name}@tp0",
        request_id=f"cmpl-{name}",
        remote_request_id=f"cmpl-{name}-p",
        started=time.time(),
    )


@functools.cache
def _samples() -> list[TransferRecord]:
    return [_sample(number) for number in range(1000)]


def _sample(number: int) -> TransferRecord:
    runs = tuple((random.randrange(1 << 16), random.randrange(1, 10)) for _ in range(12))  # noqa: S311 - no secret
    return TransferRecord(
        transfer_id="",
        request_id="",
        local_engine="decode-0",
        local_rank="tp0",
        local_generation="0123456789abcdef",
        remote_engine=f"prefill-{number % 8}",
        remote_generation="fedcba9876543210",
        remote_request_id="",
        backend="nixl",
        mode="pull",
        state="miss" if number % 100 == 0 else "done",
        cause="peer went away" if number % 100 == 0 else "",
        tokens=1024,
        bytes=64 << 20,
        descriptors=2048,
        coalesced_descriptors=384,
        remote_ranks=("tp0",),
        groups=(GroupShare(0, "full", 64, 64 << 20),),
        stages=dict.fromkeys(STAGES, 0.001),
        local_blocks=(BlockRuns(0, 0, runs),),
        remote_blocks=(BlockRuns(0, 0, runs),),
        moments=dict.fromkeys(("queued", "planned", "posting", "posted", "first", "last", "reported"), 0.01),
    )


def fill(kvd: Kvd, rows: int) -> dict[str, float]:
    """Record so many transfers as fast as they are taken; memory on the way."""
    reporter, sent, began = Reporter(kvd.directory), 0, time.monotonic()
    memory = {}
    while sent < rows or reporter.waiting:
        while sent < rows and len(reporter.waiting) < WINDOW:
            reporter.report(tuple(record(sent + n) for n in range(min(BATCH, rows - sent))))
            sent += BATCH
        reporter.take(10_000)
        done = len(reporter.acknowledged)
        step = max(1, rows // 10)
        if done // step > len(memory):
            memory[f"{done // 1000}k"] = kvd.megabytes()
            sys.stderr.write(f"{done} recorded, {kvd.megabytes():.1f} MB\n")
    seconds = time.monotonic() - began
    reporter.socket.close()
    return {"records_per_second": rows / seconds, **{f"megabytes_at_{k}": v for k, v in memory.items()}}


def pace(directory: str, rate: float, go: object, stop: object, plain: object) -> None:
    """In a process of its own: a report of one record ``rate`` times a second, while told to.

    With ``plain`` set it is a heartbeat of nobody instead: as many messages, and nothing to record.
    """
    reporter, number = Reporter(Path(directory)), 0
    while not stop.is_set():  # type: ignore[attr-defined]
        if not go.wait(0.2):  # type: ignore[attr-defined]
            continue
        begun = time.monotonic()
        if plain.is_set():  # type: ignore[attr-defined]
            reporter.socket.send(encode(Heartbeat(incarnation="nobody"), 0))
        else:
            reporter.report((record(number),))
        number += 1
        while reporter.take(0):
            pass
        time.sleep(max(0.0, 1 / rate - (time.monotonic() - begun)))


@contextlib.contextmanager
def paced(kvd: Kvd, rate: float) -> Iterator[tuple[object, object]]:
    """A process that sends to this kvd whenever the first event is set; without records while the second one is."""
    context = multiprocessing.get_context("spawn")
    go, stop, plain = context.Event(), context.Event(), context.Event()
    process = context.Process(target=pace, args=(str(kvd.directory), rate, go, stop, plain))
    process.start()
    try:
        yield go, plain
    finally:
        stop.set()
        process.join()


class Prober:
    """A registered client that asks one thing at a time."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.operator = stack.enter_context(connect(directory, 30.0))
        engine = EngineFacts(engine_id="bench", model="none")
        self.operator.ask(RegisterScheduler(engine=engine, incarnation="probe", pid=os.getpid()))

    def beat(self) -> float:
        """Seconds until a heartbeat was answered."""
        begun = time.perf_counter()
        self.operator.ask(Heartbeat(incarnation="probe"))
        return time.perf_counter() - begun


Block = dict[str, list[float]]
"""Seconds of each reply of one block, by ledger."""


def replies(full: Kvd, empty: Kvd, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """How long both kvds' heartbeats take, with and without records; quantiles in us, and the ratios of the two."""
    found: dict[str, list[Block]] = {"recording": [], "messages": []}
    with contextlib.ExitStack() as stack:
        paces = [stack.enter_context(paced(kvd, options.rate)) for kvd in (full, empty)]
        probers = {name: Prober(kvd.directory, stack) for name, kvd in (("full", full), ("empty", empty))}
        for number in range(options.blocks + 1):
            for kind in random.sample(sorted(found), len(found)):
                for go, plain in paces:
                    (plain.clear if kind == "recording" else plain.set)()  # type: ignore[attr-defined]
                    go.set()  # type: ignore[attr-defined]
                block = beats(probers, options.seconds)
                for go, _ in paces:
                    go.clear()  # type: ignore[attr-defined]
                if number:  # the first round warms up
                    found[kind].append(block)
                time.sleep(0.1)
    return {kind: compared(blocks) for kind, blocks in found.items()}


def beats(probers: dict[str, Prober], seconds: float) -> Block:
    """One heartbeat to each, in random order, again and again."""
    times: Block = {name: [] for name in probers}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name in random.sample(sorted(probers), len(probers)):
            times[name].append(probers[name].beat())
        time.sleep(PROBE_SECONDS)
    return times


def compared(blocks: list[Block]) -> dict[str, float]:
    """Quantiles over all blocks, the ratio full to empty, and where that lies in 95 of 100 draws of the blocks."""
    found: dict[str, float] = {"replies": sum(len(block["full"]) for block in blocks)}
    samples = {name: [np.array(block[name]) for block in blocks] for name in ("full", "empty")}
    drawn = [random.choices(range(len(blocks)), k=len(blocks)) for _ in range(DRAWS)]  # noqa: S311 - no secret
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        whole = {of: float(np.quantile(np.concatenate(each), share)) for of, each in samples.items()}
        ratios = [
            float(
                np.quantile(np.concatenate([samples["full"][at] for at in draw]), share)
                / np.quantile(np.concatenate([samples["empty"][at] for at in draw]), share)
            )
            for draw in drawn
        ]
        found |= {f"{of}_{name}_us": 1e6 * value for of, value in whole.items()}
        found[f"{name}_ratio"] = whole["full"] / whole["empty"]
        found[f"{name}_ratio_low"], found[f"{name}_ratio_high"] = np.quantile(ratios, (0.025, 0.975)).tolist()
    return found


def asked(kvd: Kvd, *arguments: str, repeats: int = 10) -> dict[str, float]:
    """Seconds that a kvctl command takes, the start of Python included."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "kvctl",
                *arguments,
                "--runtime-dir",
                str(kvd.directory),
                "--timeout",
                "60",
            ],
            check=True,
            capture_output=True,
        )
        times.append(time.perf_counter() - begun)
    return {"seconds_best": min(times), "seconds_median": _quantile(times, 0.5)}


def killed(kvd: Kvd, rounds: int) -> dict[str, float]:
    """SIGKILL while records come; what was acknowledged must be there after the next start."""
    lost = acknowledged = 0
    starts = []
    for _ in range(rounds):
        reporter, until = Reporter(kvd.directory), time.monotonic() + random.uniform(0.3, 1.5)  # noqa: S311
        while time.monotonic() < until:
            if len(reporter.waiting) < WINDOW:
                reporter.report(tuple(record(n) for n in range(10)))
            while reporter.take(0):
                pass
        os.kill(kvd.pid, signal.SIGKILL)
        kvd.kill()
        while reporter.take(200):  # answers that had left kvd before its end
            pass
        reporter.socket.close()
        starts.append(kvd.start())
        with contextlib.closing(sqlite3.connect(kvd.ledger)) as database:
            ids = {row[0] for row in database.execute("SELECT transfer_id FROM transfers")}
            if database.execute("PRAGMA quick_check").fetchone() != ("ok",):
                sys.exit("the ledger is damaged")
        acknowledged += len(reporter.acknowledged)
        lost += len(set(reporter.acknowledged) - ids)
    if "set aside" in kvd.directory.with_suffix(".log").read_text():
        sys.exit("the ledger was set aside")
    return {"rounds": rounds, "acknowledged": acknowledged, "lost": lost, "restart_seconds": max(starts)}


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def parts(full: Kvd, empty: Kvd, crashing: Kvd, options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """Each figure as soon as it is known: a run takes minutes, and may be ended before it is over."""
    yield "memory_at_start", full.megabytes()
    yield "fill", fill(full, options.rows)
    yield "ledger_bytes", full.ledger.stat().st_size
    yield "transfers --last 50", asked(full, "transfers", "--last", "50")
    yield "transfers --last 50, empty", asked(empty, "transfers", "--last", "50")
    yield "replies", replies(full, empty, options)
    yield "memory_at_end", full.megabytes()
    yield "transfers --sort slowest", asked(full, "transfers", "--sort", "slowest", repeats=2)
    yield "slow", asked(full, "slow", repeats=2)
    yield "killed", killed(crashing, options.kills)
    full.kill()
    yield "restart_seconds_full", full.start()


def main() -> None:
    """Run all parts, print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-ledger-") as place:
        full, empty, crashing = (Kvd(Path(place) / n, options.rows) for n in ("full", "empty", "crash"))
        try:
            for kvd in (full, empty, crashing):
                kvd.start()
            result: dict[str, object] = {}
            for name, value in parts(full, empty, crashing, options):
                result[name] = value
                sys.stderr.write(f"{name}: {json.dumps(value)}\n")
        finally:
            for kvd in (full, empty, crashing):
                kvd.kill()
    if options.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name}: {json.dumps(value) if isinstance(value, dict) else value}\n")
    speed = result["replies"]
    assert isinstance(speed, dict)  # noqa: S101 - see above
    for kind, seen in speed.items():
        ratios = (
            f"{q} {seen[f'{q}_ratio']:.3f} ({seen[f'{q}_ratio_low']:.3f} to {seen[f'{q}_ratio_high']:.3f})"
            for q in ("p50", "p90", "p99")
        )
        sys.stdout.write(f"replies, a full ledger to an empty one, {kind}: {', '.join(ratios)}\n")


if __name__ == "__main__":
    main()
