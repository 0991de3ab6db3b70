"""The kvds of one or two "hosts" on this machine: separate runtime directories, peers over loopback TCP."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvctl.errors import UsageError
from kvctl.processes import tied
from kvctl.processes.errors import DaemonStartFailed
from kvctl.processes.interruption import held, unwinding
from kvctl.processes.spawn import spawn
from kvd.client.errors import ClientError
from kvd.client.operator import connect
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.names import socket_address
from kvd.wire.query import GetStatus, KvdStatus

LONGEST_FOLDER = 80
"""Bytes of a path below which a host's sockets may stand; the path of a Unix socket may have 107."""


@dataclass(slots=True)
class Kvd:
    """A running kvd of one "host"."""

    name: str
    directory: Path
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Its local socket."""
        return socket_address(self.directory)

    def ask(self, message: Message, timeout: float = 30.0) -> Message:
        """One question to it, as kvctl would ask. Raises `ClientError`."""
        with connect(self.address, timeout) as operator:
            return operator.ask(message)

    def endpoint(self) -> Endpoint:
        """Where other kvds reach it. Raises `ClientError`."""
        return cast("KvdStatus", self.ask(GetStatus())).endpoint

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until it answers, at most ``timeout`` seconds.

        Raises:
            DaemonStartFailed: it ended or did not answer in time; the message ends with its log.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise DaemonStartFailed(
                    f"kvd of host {self.name} did not come up; its log:\n"
                    f"{self.log_path.read_text(errors='replace')}"
                )
            with contextlib.suppress(ClientError), connect(self.address, 1.0):
                return
            time.sleep(0.02)  # the socket appears when it appears; nothing announces it

    def stop(self, timeout: float = 10.0) -> None:
        """End it in order, by force if that takes more than ``timeout`` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def two_hosts(work_dir: Path, settings: Mapping[str, str] | None = None) -> Iterator[tuple[Kvd, Kvd]]:
    """The prefilling and the decoding host's kvds, both ready; ended on the way out.

    ``settings`` are ``KVD_SECTION_KEY`` variables for both. Raises `DaemonStartFailed`.
    """
    with unwinding() as stack:
        runtime = _runtime_folder(work_dir, stack)
        hosts = []
        for name in ("prefill", "decode"):
            with held():
                hosts.append(launch(name, runtime / name, "127.0.0.1:0", settings or {}))
                stack.callback(hosts[-1].stop)
        for host in hosts:
            host.wait_ready()
        yield hosts[0], hosts[1]


def _runtime_folder(work_dir: Path, stack: contextlib.ExitStack) -> Path:
    """A fresh folder for both runtime directories: in ``work_dir``, or a throwaway one if that path is too long."""
    work_dir.mkdir(parents=True, exist_ok=True)
    if len(os.fsencode(work_dir)) < LONGEST_FOLDER - len("/hosts-xxxxxxxx"):
        return Path(tempfile.mkdtemp(prefix="hosts-", dir=work_dir))
    base, most = tempfile.gettempdir(), LONGEST_FOLDER - len("/kvctl-xxxxxxxx/")
    if len(os.fsencode(base)) > most:
        raise UsageError(
            f"temporary files go to {base}, whose path has {len(os.fsencode(base))} bytes:"
            f" sockets of two kvds in it take one of at most {most}",
            "set TMPDIR to a folder with a shorter path",
        )
    with held():
        folder = Path(tempfile.mkdtemp(prefix="kvctl-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def launch(name: str, directory: Path, listen: str, settings: Mapping[str, str]) -> Kvd:
    """Start a kvd whose files all lie in ``directory``; it ends with the thread that started it."""
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    path = directory / "kvd.log"
    places = ("--runtime-dir", str(directory), "--state-dir", str(directory / "state"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")} | dict(settings)
    command = tied.command("kvd.service", *places, "--listen", listen)
    return Kvd(name, directory, path, spawn(command, path, environment))
