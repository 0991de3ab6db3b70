"""An honest client of a kvd under attack: `python -m tests.support.pinger DIRECTORY PID` pings and watches its memory.

It sends a heartbeat of nobody every 5 ms, whether the last one was answered or not: the cheapest question there is. It
says "pinging" after the first answer, stops at the end of its standard input, and then writes a `Pings` as JSON.

Attacker, kvd and this process share few cores, and how long the machine lets them wait for one says nothing of kvd. So
the kernel's own count of that (the second number of schedstat, `Documentation/scheduler/sched-stats.rst`) is taken out
of each latency: that of all threads of this process, and that of the thread of kvd's loop. What kvd computes, and what
its loop waits for its other threads, stays in.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from kvd.wire.frame import decode, encode
from kvd.wire.names import socket_address
from kvd.wire.registration import Heartbeat, NotRegistered

EVERY_SECONDS = 0.005
LOOK_SECONDS = 0.02
"""How often kvd's memory is looked at."""
LAST_SECONDS = 2.0
"""How long the last answers may take."""
FIRST_MS = 20_000
CONTEXT: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
QUESTION = Heartbeat(incarnation="nobody")


class Pings(msgspec.Struct, frozen=True):
    """What one pinger saw: latencies in seconds, kvd's most memory in bytes, pings that nobody answered.

    A ping without an answer, or with a refusal, counts as one that took until the end. ``waited`` is what was taken
    out, in seconds, of the latency that had the most of it.
    """

    latencies: list[float]
    unanswered: int
    rss_peak: int
    waited: float


class Delays:
    """How long threads were ready to run and did not, in seconds since they began."""

    def __init__(self, pid: int) -> None:
        own = Path("/proc/self/task")
        paths = [*(task / "schedstat" for task in own.iterdir()), Path(f"/proc/{pid}/task/{pid}/schedstat")]
        self._files = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]

    def read(self) -> float:
        """All of them together; a thread that ended counts no further."""
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError, IndexError):
                total += int(os.pread(file, 128, 0).split()[1])
        return total / 1e9


def memory(pid: int) -> int:
    """What a process has in memory, the most so far, in bytes; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def forget_peak(pid: int) -> None:
    """From now on `memory` tells of what comes, not of what was."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def connected(directory: Path) -> zmq.Socket[bytes]:
    """A socket whose first ping was answered."""
    socket = CONTEXT.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.connect(socket_address(directory))
    socket.send(encode(QUESTION, 1))
    if not socket.poll(FIRST_MS):
        raise SystemExit(f"kvd in {directory} does not answer before it is attacked")
    socket.recv()
    return socket


def ping(directory: Path, pid: int) -> Pings:
    """Ping until standard input ends."""
    socket = connected(directory)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(0, zmq.POLLIN)
    delays = Delays(pid)
    forget_peak(pid)
    sys.stdout.write("pinging\n")
    sys.stdout.flush()

    sent: dict[int, tuple[float, float]] = {}
    latencies: list[float] = []
    waited = 0.0
    rss = number = 0
    due = looked = time.monotonic()
    ends: float | None = None
    while ends is None or (sent and time.monotonic() < ends):
        next_due = due if ends is None else ends
        ready = dict(poller.poll(max(0, int((next_due - time.monotonic()) * 1000) + 1)))
        if socket in ready:
            now, delay = time.monotonic(), delays.read()
            with contextlib.suppress(zmq.Again):
                while True:
                    message, correlation = decode(socket.recv(zmq.NOBLOCK))
                    if isinstance(message, NotRegistered) and (asked := sent.pop(correlation, None)):
                        out = delay - asked[1]
                        waited = max(waited, out)
                        latencies.append(max(0.0, now - asked[0] - out))
        now = time.monotonic()
        if 0 in ready and ends is None and not os.read(0, 64):
            poller.unregister(0)
            ends = now + LAST_SECONDS
        if ends is None and now >= due:
            number += 1
            sent[number] = now, delays.read()
            with contextlib.suppress(zmq.Again):  # there is nobody to send to: it goes unanswered
                socket.send(encode(QUESTION, number), zmq.NOBLOCK)
            due = max(due + EVERY_SECONDS, now)
        if now - looked > LOOK_SECONDS:
            looked, rss = now, max(rss, memory(pid))
    now, delay = time.monotonic(), delays.read()
    waited = max([waited, *(delay - before for _, before in sent.values())])
    latencies += [max(0.0, now - began - max(0.0, delay - before)) for began, before in sent.values()]
    return Pings(latencies, len(sent), max(rss, memory(pid)), waited)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(ping(Path(sys.argv[1]), int(sys.argv[2]))))
