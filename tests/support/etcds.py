"""Real etcd servers for tests, on loopback: stopped, killed, emptied and set back as a test likes."""

from __future__ import annotations

import base64
import json
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import wait_for
from tests.support.ports import free_port

_UNPACKED = Path(__file__).parents[2] / ".builds" / "etcd" / "usr" / "bin"


def _program(name: str) -> str:
    return shutil.which(name) or (str(_UNPACKED / name) if (_UNPACKED / name).exists() else "")


PROGRAM, TOOL = _program("etcd"), _program("etcdctl")
NEEDS_ETCD = pytest.mark.skipif(not PROGRAM, reason="etcd is not here (Debian: etcd-server; .ci/setup etcd)")
NEEDS_ETCDCTL = pytest.mark.skipif(
    not TOOL, reason="etcdctl is not here (Debian: etcd-client; .ci/setup etcd)"
)
PREFIX = "/kvd/v1/test/hosts/"


@dataclass
class Etcd:
    """One etcd server with a folder for its data."""

    folder: Path
    port: int = field(default_factory=free_port)
    peers: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    arguments: tuple[str, ...] = ()
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        """Its data."""
        return self.folder / "data"

    def start(self) -> Etcd:
        """Start it with the data that are there; it serves when this returns, where a test may ask it."""
        self.start_quietly()
        if self.scheme == "http":
            wait_for(self.healthy, 20.0)
        return self

    def start_quietly(self) -> None:
        """Start it, and wait for nothing: it may not let tests in."""
        peers = f"http://127.0.0.1:{self.peers}"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "--data-dir", str(self.data), "--listen-client-urls", self.url, "--unsafe-no-fsync",
                 "--advertise-client-urls", self.url, "--listen-peer-urls", peers, "--initial-cluster",
                 f"default={peers}", "--initial-advertise-peer-urls", peers, *self.arguments],
                stdout=log, stderr=log,
            )  # fmt: skip

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return bool(self.ask("/v3/kv/range", {"key": encoded("none")}))
        except (OSError, urllib.error.URLError):
            return False

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the gateway answers."""
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode())  # noqa: S310 - ours
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310 - ours
            answer: dict[str, Any] = json.loads(response.read())
        return answer

    def put(self, name: str, value: bytes | str) -> None:
        """Write what is to be a host's value, without a lease."""
        text = value.encode() if isinstance(value, str) else value
        self.ask("/v3/kv/put", {"key": encoded(PREFIX + name), "value": base64.b64encode(text).decode()})

    def delete(self, name: str) -> None:
        """Take a host's key out."""
        self.ask("/v3/kv/deleterange", {"key": encoded(PREFIX + name)})

    def hosts(self) -> dict[str, dict[str, Any]]:
        """The keys of hosts by name, with value, lease and revision."""
        answer = self.ask("/v3/kv/range", {"key": encoded(PREFIX), "range_end": encoded(PREFIX[:-1] + "0")})
        found = {}
        for kv in answer.get("kvs", ()):
            name = base64.b64decode(kv["key"]).decode("utf-8", "replace")[len(PREFIX) :]
            found[name] = {**kv, "text": base64.b64decode(kv.get("value", "")).decode("utf-8", "replace")}
        return found

    def revision(self) -> int:
        """The revision of its data."""
        return int(self.ask("/v3/kv/range", {"key": encoded("none")})["header"]["revision"])

    def compact(self) -> None:
        """Forget all that was before now."""
        self.ask("/v3/kv/compaction", {"revision": str(self.revision()), "physical": True})

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def go_on(self) -> None:
        """Have it serve, whether it was stopped, killed or nothing."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        else:
            self.start()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def empty(self) -> None:
        """Take all its data away; it must not run."""
        shutil.rmtree(self.data)

    def save(self) -> Path:
        """A snapshot of its data as operators make it; it must run."""
        made = self.folder / "snapshot.db"
        self._tool("--endpoints", self.url, "snapshot", "save", str(made))
        return made

    def restore(self, snapshot: Path) -> None:
        """Put a snapshot in place of its data; it must not run."""
        self.empty()
        peers = f"http://127.0.0.1:{self.peers}"
        self._tool(
            "snapshot", "restore", str(snapshot), "--data-dir", str(self.data), "--name", "default",
            "--initial-cluster", f"default={peers}", "--initial-advertise-peer-urls", peers,
        )  # fmt: skip

    def _tool(self, *words: str) -> None:
        subprocess.run([TOOL, *words], check=True, capture_output=True, timeout=60)

    def keep(self) -> Path:
        """Copy its data, to be set back later; it must not run."""
        return Path(shutil.copytree(self.data, self.folder / "kept"))

    def set_back(self, kept: Path) -> None:
        """Put the copy in place of its data; it must not run."""
        self.empty()
        shutil.copytree(kept, self.data)


@contextmanager
def etcd(*arguments: str) -> Iterator[Etcd]:
    """A running etcd, killed at the end."""
    with tempfile.TemporaryDirectory(prefix="etcd-") as place:
        made = Etcd(Path(place), arguments=arguments)
        try:
            yield made.start()
        finally:
            made.kill()


def encoded(text: str) -> str:
    """As the gateway wants keys."""
    return base64.b64encode(text.encode()).decode()
