"""Workers to read from directly (`tests.support.direct_peer`), started and told what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Worker:
    """A running one: its metadata, and where its memory begins in it."""

    process: subprocess.Popen[str]
    metadata: bytes
    address: int

    def order(self, word: str) -> None:
        """Have it do what ``tests.support.direct_peer`` knows by that word; returns when it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        """End it (SIGKILL)."""
        self.process.kill()
        self.process.wait()


@contextmanager
def started(
    size: int, *, memfd: bool | str = False, uid: int | None = None, dumpable: bool = True
) -> Iterator[Worker]:
    """One with so many bytes, until the end of the block."""
    wanted = {"size": size, "memfd": memfd, "uid": uid, "dumpable": dumpable}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.direct_peer", json.dumps(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        yield Worker(process, bytes.fromhex(hello["metadata"]), hello["address"])
    finally:
        process.kill()
        process.communicate()
