"""One small deployment on this machine: two "hosts", each with its own kvd and one engine, a prefiller and a decoder.

The hosts are separate runtime directories; their kvds speak to each other over loopback TCP, as they would between
machines. What a router does (prefill here, hand the answer's params on, decode there) is `Deployment.ask`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.demo.engine import Answer, EngineProcess, EngineSpec
from kvctl.demo.errors import DaemonStartFailed
from kvd.client.errors import ClientError
from kvd.client.operator import connect
from kvd.wire.frame import Message
from kvd.wire.names import socket_address

PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router sends along with the prompt to the prefiller."""


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

    def ask(self, message: Message, timeout: float = 5.0) -> Message:
        """One question to it, as kvctl would ask. Raises `ClientError`."""
        with connect(self.address, timeout) as operator:
            return operator.ask(message)

    def stop(self, timeout: float = 10.0) -> None:
        """End it in order, by force if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt's way through both engines. Times are in seconds."""

    prefilled: Answer
    decoded: Answer


@dataclass(slots=True)
class Deployment:
    """Everything that runs; made by `deploy`."""

    prefill_host: Kvd
    decode_host: Kvd
    prefill: EngineProcess
    decode: EngineProcess
    sockets: list[Path] = field(default_factory=list)

    def ask(self, prompt: Sequence[int], max_tokens: int, timeout: float = 120.0) -> Asked:
        """Prefill on one engine, decode on the other, as a router would do it."""
        prefilled = self.prefill.submit(prompt, 1, PREFILL_PARAMS).result(timeout)
        decoded = self.decode.submit(prompt, max_tokens, prefilled.kv_transfer_params).result(timeout)
        return Asked(prefilled, decoded)


def start_kvd(name: str, directory: Path, *, listen: str = "127.0.0.1:0", timeout: float = 30.0) -> Kvd:
    """Start a kvd whose files all lie in ``directory`` and wait until it answers.

    Raises:
        DaemonStartFailed: it ended or did not answer in time; the message ends with its log.
    """
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    kvd = Kvd(name, directory, directory / "kvd.log", _spawn_kvd(directory, listen))
    deadline = time.monotonic() + timeout
    while True:
        if kvd.process.poll() is not None or time.monotonic() > deadline:
            kvd.stop()
            raise DaemonStartFailed(
                f"kvd of host {name} did not come up:\n{kvd.log_path.read_text(errors='replace')}"
            )
        with contextlib.suppress(ClientError), connect(kvd.address, 1.0):
            return kvd
        time.sleep(0.02)  # the socket appears when it appears; nothing announces it


def transfer_config(
    kvd: Kvd, engine_id: str, role: str, *, policy: str = "recompute", extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """vLLM's kv_transfer_config for an engine beside ``kvd``."""
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd.vllm",
        "kv_role": role,
        "engine_id": engine_id,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"runtime_dir": str(kvd.directory), **(extra or {})},
    }


@contextlib.contextmanager
def deploy(
    work_dir: Path,
    prefill: EngineSpec,
    decode: EngineSpec,
    *,
    extra: Mapping[str, Any] | None = None,
    ready_timeout: float = 300.0,
) -> Iterator[Deployment]:
    """Start two kvds and two engines and wait until all are ready; end them all on the way out.

    ``extra`` are further connector settings for both engines. Specs come without a kv_transfer_config.
    """
    import dataclasses

    with contextlib.ExitStack() as stack:
        runtime = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-", dir=short_folder(work_dir)))
        )
        hosts = []
        for name in ("prefill", "decode"):
            host = start_kvd(name, runtime / name[0])
            stack.callback(host.stop)
            hosts.append(host)
        engines = []
        for host, spec, role in zip(hosts, (prefill, decode), ("kv_producer", "kv_consumer"), strict=True):
            config = transfer_config(host, f"{host.name}-engine", role, extra=extra)
            engines.append(
                stack.enter_context(EngineProcess.start(dataclasses.replace(spec, kv_transfer_config=config)))
            )
        for engine in engines:
            engine.wait_ready(ready_timeout)
        yield Deployment(hosts[0], hosts[1], engines[0], engines[1])


def short_folder(work_dir: Path) -> Path:
    """``work_dir``, or the system's folder for temporary files where paths below it would be too long for a socket."""
    work_dir.mkdir(parents=True, exist_ok=True)
    return work_dir if len(str(work_dir)) < 60 else Path(tempfile.gettempdir())


def _spawn_kvd(directory: Path, listen: str) -> subprocess.Popen[bytes]:
    with (directory / "kvd.log").open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvd.service",
                "--runtime-dir",
                str(directory),
                "--state-dir",
                str(directory / "state"),
                "--listen",
                listen,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if not k.startswith("KVD_")},
            # Ctrl-C at a terminal reaches the parent alone, which ends this one last.
            start_new_session=True,
        )
