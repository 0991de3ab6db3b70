"""A client of kvd that is another user's process: what it may do, the kernel decides and kvd."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.wire.frame import Message, decode, encode
from kvd.wire.reply import Refused
from tests.support.daemons import ROOT, Daemon

GROUP = 61_000
"""A group that nobody is in, which may use the kvds of `shared_kvd`."""
VICTIM, ATTACKER = 61_001, 61_002
"""Two users, of whom the second tries what only the first may do."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run clients as other users")

_PROCESS = """
import os, struct, sys
sys.path[:0] = sys.argv[1].split(":")
address, uid, gid = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
import zmq
from kvd.wire.frame import decode
os.setgroups([])
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.linger = 0
socket.connect(address)
while len(head := sys.stdin.buffer.read(4)) == 4:
    frame = sys.stdin.buffer.read(struct.unpack("I", head)[0])
    socket.send(frame)
    while True:
        answer = socket.recv()
        if decode(answer)[1] == decode(frame)[1]:
            break
    sys.stdout.buffer.write(struct.pack("I", len(answer)) + answer)
    sys.stdout.buffer.flush()
"""


@dataclass
class OtherUser:
    """A process with one connection to kvd."""

    process: subprocess.Popen[bytes]
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def ask(self, message: Message) -> Message:
        """What kvd answers it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        frame = encode(message, next(self.ids))
        self.process.stdin.write(struct.pack("I", len(frame)) + frame)
        self.process.stdin.flush()
        (size,) = struct.unpack("I", self.process.stdout.read(4))
        return decode(self.process.stdout.read(size))[0]

    def refused(self, message: Message) -> Refused:
        """The refusal of a message that must be refused."""
        answer = self.ask(message)
        assert isinstance(answer, Refused), answer
        return answer

    def end(self) -> None:
        """It dies, without a word."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def other_user(daemon: Daemon, uid: int, gid: int = GROUP) -> Iterator[OtherUser]:
    """A process of that user in a group that may use kvd, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, f"{ROOT / 'daemon'}:{ROOT}", f"ipc://{daemon.directory}/kvd.sock",
         str(uid), str(gid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    made = OtherUser(process)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def shared_kvd(**environment: str) -> Iterator[Daemon]:
    """A kvd that the members of `GROUP` may use, as systemd's unit makes one for group kvd."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as place:
        Path(place).chmod(0o711)
        directory = Path(place) / "run"
        directory.mkdir()
        os.chown(directory, 0, GROUP)
        directory.chmod(0o2750)  # the sockets in it are the group's too
        daemon = Daemon(directory, environment=environment)
        try:
            yield daemon.start()
        finally:
            daemon.kill()
