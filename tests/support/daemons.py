"""Real kvd processes for tests, and the cards of workers that are not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvd.client.errors import ClientError, RefusedByDaemon
from kvd.client.operator import Operator, connect
from kvd.client.session import KvdSession
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import Axis, Field, Group, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint, EngineFacts, Role, WorkerCard
from kvd.wire.query import (
    EngineList,
    EngineRow,
    GetStatus,
    KvdStatus,
    ListEngines,
    ListWorkers,
    WorkerList,
    WorkerRow,
)
from kvd.wire.registration import OpenLease, RegisterScheduler, RegisterWorker
from kvd.wire.reply import Refused
from kvd.wire.transfer import ReportTransfers, TransferRecord
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 20.0

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], seconds: float = 10.0) -> T:
    """What ``look`` gives as soon as it is true; AssertionError with the last value after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"still {value!r} after {seconds:g} s"
        time.sleep(0.005)
    return value


def measured(what: str, seconds: float) -> None:
    """Show a figure to whoever runs the tests with -s."""
    sys.stderr.write(f"\nmeasured: {what}: {seconds * 1000:.1f} ms\n")


@dataclass
class Daemon:
    """One kvd process in a directory of its own; started and killed as often as a test likes.

    It writes to ``stderr`` where that is given, a file descriptor, and else to a file (`log`). ``by`` is a command that
    starts it, such as ``prlimit``, and becomes it. Peers reach it at ``host``, where it has a port of its own.
    """

    directory: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    port: int = 0
    stderr: int | None = None
    by: tuple[str, ...] = ()
    host: str = "127.0.0.1"

    def start(self, *, wait: bool = True) -> Daemon:
        """Start it; it serves when this returns. It has the same peer port each time."""
        self.port = self.port or free_port(self.host)
        listen = ("--listen", f"{self.host}:{self.port}")
        paths = os.pathsep.join([str(ROOT / "daemon"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("KVD_", "NOTIFY_", "WATCHDOG_"))
        }
        log = (self.directory.parent / f"{self.directory.name}.log").open("a")
        with log:
            self.process = subprocess.Popen(
                [
                    *self.by,
                    sys.executable,
                    "-m",
                    "kvd.service",
                    "--runtime-dir",
                    str(self.directory),
                    *listen,
                    *self.arguments,
                ],
                env={**environment, "PYTHONPATH": paths, **self.environment},
                stderr=log if self.stderr is None else self.stderr,
                stdout=log,
                text=True,
            )
        if wait:
            self.port = self.status(START_SECONDS).endpoint.port
        return self

    @property
    def log(self) -> str:
        """All that it wrote so far."""
        return (self.directory.parent / f"{self.directory.name}.log").read_text()

    @property
    def endpoint(self) -> Endpoint:
        """Where other kvds reach it."""
        return Endpoint(self.host, self.port)

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self, seconds: float = 15.0) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(seconds)

    def ask(self, message: Message, timeout: float = 10.0) -> Message:
        """One question on a connection of its own."""
        with connect(self.directory, timeout) as operator:
            return operator.ask(message)

    def ask_refused(self, message: Message) -> Refused:
        """The refusal of a message that must be refused."""
        try:
            answer = self.ask(message)
        except RefusedByDaemon as error:
            return error.refusal
        raise AssertionError(f"not refused: {answer}")

    def status(self, seconds: float = 10.0) -> KvdStatus:
        """Its status, waiting for it to serve."""

        def look() -> KvdStatus | None:
            assert self.process is not None
            assert self.process.poll() is None, f"kvd ended with {self.process.returncode}:\n{self.log}"
            try:
                answer = self.ask(GetStatus())
            except ClientError:
                return None
            assert isinstance(answer, KvdStatus)
            return answer

        try:
            return wait_for(look, seconds)
        except AssertionError as error:
            raise AssertionError(f"kvd does not answer:\n{self.log}") from error

    def engines(self, *, cards: bool = False) -> dict[str, EngineRow]:
        """The engines it knows, by id; a local one wins over a peer of the same id."""
        answer = self.ask(ListEngines(cards=cards))
        assert isinstance(answer, EngineList)
        rows = answer.rows
        while answer.more:
            answer = self.ask(ListEngines(cards=cards, after=answer.more))
            assert isinstance(answer, EngineList)
            rows += answer.rows
        return {row.engine.engine_id: row for row in reversed(rows)}

    def workers(self) -> tuple[WorkerRow, ...]:
        """Its local clients."""
        answer = self.ask(ListWorkers())
        assert isinstance(answer, WorkerList)
        rows = answer.rows
        while answer.more:
            answer = self.ask(ListWorkers(after=answer.more))
            assert isinstance(answer, WorkerList)
            rows += answer.rows
        return rows

    def operator(self) -> Operator:
        """A connection that the caller closes."""
        return connect(self.directory, 10.0)


@contextmanager
def daemons(count: int = 1, *arguments: str, base: Path | None = None) -> Iterator[list[Daemon]]:
    """Running kvds, each in its own directory, killed at the end. The directories have short paths, as ipc wants."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir=base) as place:
        made = [Daemon(Path(place) / f"d{number}", arguments) for number in range(count)]
        try:
            for daemon in made:
                daemon.start()
            yield made
        finally:
            for daemon in made:
                if daemon.process is not None and daemon.process.poll() is None:
                    daemon.signal(signal.SIGCONT)
                daemon.kill()


def geometry(rank: int = 0, blocks: int = 8, dtype: str = "float32") -> bytes:
    """The encoded geometry of a worker with one layer: a head of one float32 for each of 16 tokens, on every rank.

    ``dtype`` is what its four bytes are called.
    """
    axes = (Axis("head", 0, 1, 1, 64), Axis("token", 0, 16, 1, 4))
    page = Page(64, (Field("k", dtype, 4, 0, axes, (("head", 1), ("token", 16))),))
    layers = (Layer("layer.0", page, region=0, offset=0, stride=64),)
    group = Group(0, "full", 16, layers)
    return encode_worker(WorkerGeometry(Rank(tp=rank), blocks, (Region(0x10000, 64 * blocks),), (group,)))


def facts(
    engine_id: str,
    *,
    tp: int = 1,
    model: str = "tiny",
    role: Role = "both",
    **known: str | float | bool | None,
) -> EngineFacts:
    """The facts of an engine with ``tp`` workers."""
    return EngineFacts(engine_id=engine_id, model=model, role=role, tp=tp, world_size=tp, facts=known)


def worker(engine: EngineFacts, rank: int = 0, incarnation: str = "", pid: int = 0) -> RegisterWorker:
    """What a worker presents; a new incarnation unless one is given."""
    return RegisterWorker(
        WorkerCard(
            engine=engine,
            rank=Rank(rank),
            incarnation=incarnation or uuid.uuid4().hex,
            pid=pid or os.getpid(),
            host="test",
            backend="direct",
            geometry=geometry(rank),
            metadata=b"metadata",
        )
    )


def scheduler(
    engine: EngineFacts,
    leases: tuple[OpenLease, ...] = (),
    incarnation: str = "",
    digest_key: bytes = b"",
) -> RegisterScheduler:
    """What a scheduler presents."""
    return RegisterScheduler(
        engine=engine,
        incarnation=incarnation or uuid.uuid4().hex,
        pid=os.getpid(),
        leases=leases,
        digest_key=digest_key,
    )


@contextmanager
def session(
    daemon: Daemon,
    card: RegisterWorker | RegisterScheduler,
    on_push: Callable[[Message], Message | None] | None = None,
) -> Iterator[KvdSession]:
    """A registered session, closed at the end."""
    made = KvdSession(lambda: card, on_push, directory=daemon.directory)
    try:
        made.wait(lambda state: state.connected, START_SECONDS)
        yield made
    finally:
        made.close()


@contextmanager
def reporter(daemon: Daemon, engine_id: str = "d") -> Iterator[Callable[..., Message]]:
    """What reports transfers as the only worker of an engine, incarnation ``i``, and gives kvd's answer."""
    with session(daemon, worker(facts(engine_id), incarnation="i")) as one:

        def report(*records: TransferRecord, seconds: float = 20.0) -> Message:
            return one.call(ReportTransfers(incarnation="i", records=records), seconds).result(seconds + 5)

        yield report


WORKER_PROCESS = """
import sys, threading
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from kvd.client.session import KvdSession
from tests.support.daemons import facts, scheduler, worker
role, engine, rank, tp, directory = sys.argv[2:7]
card = worker(facts(engine, tp=int(tp)), int(rank)) if role == "worker" else scheduler(facts(engine, tp=int(tp)))
session = KvdSession(lambda: card, directory=directory)
session.wait(lambda state: state.connected, 20)
print("registered", flush=True)
threading.Event().wait()
"""


@contextmanager
def process(
    daemon: Daemon, engine_id: str, *, role: str = "worker", rank: int = 0, tp: int = 1
) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that registered as a worker or scheduler; it may be killed or stopped at will."""
    child = subprocess.Popen(
        [sys.executable, "-c", WORKER_PROCESS, f"{ROOT / 'daemon'}:{ROOT}", role, engine_id, str(rank), str(tp),
         str(daemon.directory)],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "registered\n"
        yield child
    finally:
        child.kill()
        child.communicate()
