"""Two hosts with a kvd each that is started again whenever it ends, an engine on each, and requests between them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from kvd.client.errors import ClientError
from kvd.client.session import KvdSession
from kvd.service.peers import trust
from kvd.vllm.scheduler.leases import Lease
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseRelease
from kvd.wire.registration import RegisterWorker
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers, TransferRecord
from tests.chaos.wire import NoNamespaces, Wire, Wired
from tests.support.daemons import ROOT, START_SECONDS, Daemon, facts, scheduler, worker
from tests.support.lender import Lender

PORT = 7766
RESTART_SECONDS = 0.2
"""As in the systemd unit."""
STEP_SECONDS = 2.0
LEASE_SECONDS = 6.0
"""Those that a killed kvd's next one inherits end by their time alone (docs/connector.md)."""
DISK = "64m"
"""Size of the disk that a kvd's state lies on."""

OFFSET = """
import os, time
_now, _file = time.time, {file!r}
def _moved():
    try:
        return _now() + float(open(_file).read() or 0)
    except (OSError, ValueError):
        return _now()
time.time = _moved
"""
"""Moves kvd's clock by what stands in a file: time namespaces move no wall clock."""


@dataclass
class Host:
    """A namespace, its kvd, and whether that is to be started again when it ends."""

    network: Wired
    kvd: Daemon
    disk: Path
    clock: Path
    watched: bool = True
    starts: int = 0

    @property
    def endpoint(self) -> Endpoint:
        """Where the other host's kvd reaches this one's."""
        return Endpoint(self.network.address, PORT)

    def supervise(self, ends: threading.Event) -> None:
        """What systemd does."""
        while not ends.wait(0.02):
            process = self.kvd.process
            if self.watched and process is not None and process.poll() is not None:
                ends.wait(RESTART_SECONDS)
                self.starts += 1
                self.kvd.start(wait=False)


@dataclass
class Seen:
    """What requests came to: ``acknowledged`` transfers by id with the time, what was ``wrong``, counts of all else."""

    acknowledged: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class World:
    """The hosts, the sessions of both engines, and one request after the other."""

    def __init__(self, wire: Wire, prefill: Host, decode: Host, dice: random.Random) -> None:
        self.wire, self.prefill, self.decode, self.dice = wire, prefill, decode, dice
        self.seen = Seen()
        self.ends = threading.Event()
        self._turn = threading.Lock()
        self._numbers = 0
        self.failing = ""
        """The steps of the last request that failed."""
        self._open: dict[Future[Message], str] = {}
        self.lender = Lender(prefill.kvd)
        self.giving, self.reading, asking = worker(facts("p")), worker(facts("d")), scheduler(facts("d"))
        self.giver = self._session(prefill, self.giving)
        self.asker = KvdSession(lambda: asking, lambda _: None, directory=decode.kvd.directory)
        self.reader = self._session(decode, self.reading)

    def _session(self, host: Host, card: RegisterWorker) -> KvdSession:
        return KvdSession(lambda: card, lambda _: None, directory=host.kvd.directory)

    @property
    def hosts(self) -> tuple[Host, Host]:
        """Both."""
        return self.prefill, self.decode

    @property
    def sessions(self) -> tuple[KvdSession, ...]:
        """All of them."""
        return (self.lender.session, self.giver, self.asker, self.reader)

    def serve(self) -> None:
        """Requests until the end; one at a time, since each invariant is of one."""
        while not self.ends.is_set():
            if self._turn.acquire(timeout=0.1):
                try:
                    self.request()
                    self.free()
                finally:
                    self._turn.release()
            self.ends.wait(0.005)

    def pause(self) -> None:
        """No request is under way when this returns."""
        self._turn.acquire()

    def go_on(self) -> None:
        """Requests again."""
        self._turn.release()

    def request(self) -> bool:
        """One request, from its lease to its record; whether each step was answered as in good weather."""
        self._numbers += 1
        self.undelivered()
        request = f"r{self._numbers}-{self.dice.getrandbits(32):08x}"
        key = LeaseKey(engine_id="p", request_id=request, endpoint=self.prefill.endpoint)
        reader = uuid.uuid4().hex
        now = time.monotonic()
        self.lender.leases.open(request, LEASE_SECONDS, 3, now)
        opened = self.lender.session.deliver(
            f"lease {request}", lambda: self.lender.leases.opened_message("p", request, time.monotonic())
        )
        self._answered(opened)
        met = self._meets_peer()
        claim = self._ask(self.asker, LeaseClaim(key=key, reader=reader, extend_seconds=LEASE_SECONDS))
        claimed = isinstance(claim, LeaseClaimed) and claim.seconds > 0
        self.seen.counts["claimed" if claimed else "not claimed"] += 1
        if claimed and not self._holds(request):
            self.seen.wrong.append(f"the claim of {request} is confirmed, and its owner holds no such lease")
        record = TransferRecord(
            transfer_id=request, request_id=request, local_engine="d", local_rank="tp0", remote_engine="p",
            remote_generation="g", remote_request_id=request, backend="direct", mode="pull",
            state="done" if claimed else "miss", started=time.time(), tokens=16, bytes=64,
        )  # fmt: skip
        reported = self.reader.deliver(
            f"record {request}", ReportTransfers(incarnation=self.reading.card.incarnation, records=(record,))
        )
        reported.add_done_callback(lambda done: self._acknowledged(request, done))
        released = self.asker.deliver(f"release {request}", LeaseRelease(key=key, reader=reader))
        for what, future in (("lease", opened), ("record", reported), ("release", released)):
            self._open[future] = f"{what} {request}"
        steps = {
            "lease": self._answered(opened),
            "peer": met,
            "claim": claimed,
            "record": self._answered(reported),
            "release": self._answered(released),
        }
        self.failing = ", ".join(step for step, good in steps.items() if not good)
        if not claimed and claim is not None:
            self.failing += f" ({claim})"
        return not self.failing

    def undelivered(self) -> list[str]:
        """What is still to be delivered."""
        self._open = {future: what for future, what in self._open.items() if not future.done()}
        return list(self._open.values())

    def free(self) -> None:
        """As a prefiller's scheduler does in each step."""
        self.lender.leases.take_freed(time.monotonic(), self._close)

    def _close(self, lease: Lease) -> None:
        request, closed = lease.request_id, self.lender.leases.closed_message("p", lease)
        self._open[self.lender.session.deliver(f"closed {request}", closed)] = f"close {request}"

    def _holds(self, request: str) -> bool:
        return any(lease.request_id == request for lease in self.lender.leases.held(time.monotonic()))

    def _meets_peer(self) -> bool:
        peer = self._ask(
            self.reader, GetPeer(local_engine="d", engine_id="p", endpoint=self.prefill.endpoint)
        )
        if not isinstance(peer, PeerReady):
            return False
        if peer.peer.engine.engine_id != "p" or peer.peer.workers != (self.giving.card,):
            self.seen.wrong.append(f"asked for engine p, given another card: {peer.peer}")
        return True

    def _ask(self, session: KvdSession, message: Message) -> Message | None:
        try:
            return session.call(message, STEP_SECONDS).result(STEP_SECONDS + 1)
        except (ClientError, TimeoutError) as error:
            self.seen.counts[type(error).__name__] += 1
            return None

    def _answered(self, future: Future[Message]) -> bool:
        try:
            return isinstance(future.result(STEP_SECONDS), Ok)
        except (ClientError, TimeoutError):
            return False

    def _acknowledged(self, request: str, done: Future[Message]) -> None:
        if not done.cancelled() and done.exception() is None and isinstance(done.result(), Ok):
            self.seen.acknowledged[request] = time.monotonic()

    def close(self) -> None:
        """End all sessions."""
        self.ends.set()
        for session in self.sessions:
            session.close()


@contextlib.contextmanager
def world(wire: Wire, dice: random.Random) -> Iterator[World]:
    """Both hosts, their engines registered, requests under way."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-chaos-")))
        keys = place / "keys"
        trust.create(keys)
        hosts = [
            _host(wired, place / side, keys, stack) for wired, side in zip(wire.hosts, "ab", strict=True)
        ]
        for host in hosts:
            host.kvd.start()
        ends = threading.Event()
        for host in hosts:
            thread = threading.Thread(target=host.supervise, args=(ends,), daemon=True)
            thread.start()
            stack.callback(thread.join)
        stack.callback(ends.set)
        made = World(wire, hosts[0], hosts[1], dice)
        stack.callback(made.close)
        for session in made.sessions:
            session.wait(lambda state: state.connected, START_SECONDS)
        thread = threading.Thread(target=made.serve, name="requests", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(made.ends.set)
        yield made


def _host(network: Wired, place: Path, keys: Path, stack: contextlib.ExitStack) -> Host:
    place.mkdir()
    disk, clock = place / "state", place / "clock"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0750", "kvd-chaos", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        raise NoNamespaces("no file system can be mounted here")
    stack.callback(lambda: subprocess.run(["umount", "-l", disk], check=False))
    (place / "sitecustomize.py").write_text(OFFSET.format(file=str(clock)))
    kvd = Daemon(
        place / "run",
        ("--state-dir", str(disk / "ledger")),
        {
            "KVD_PEER_CURVE_KEY_FILE": str(keys),
            "PYTHONPATH": os.pathsep.join([str(place), str(ROOT / "daemon"), str(ROOT)]),
        },
        port=PORT,
        host=network.address,
        by=network.before,
    )
    host = Host(network, kvd, disk, clock)

    def end() -> None:
        host.watched = False
        if kvd.process is not None and kvd.process.poll() is None:
            kvd.signal(signal.SIGCONT)
        kvd.kill()

    stack.callback(end)
    return host
