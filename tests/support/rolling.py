"""Two hosts whose kvds and engines go from one version to another while clients ask without a pause."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvctl.demo.engine_spec import EngineSpec, environment
from kvd.client.errors import ClientError, ProtocolError, RefusedByDaemon
from kvd.client.operator import connect
from kvd.wire.frame import Message
from kvd.wire.query import EngineList, EngineRow, GetStatus, ListEngines
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from tests.support.daemons import ROOT, wait_for
from tests.support.deployments import found_out
from tests.support.openai_client import COMPLETIONS, GREEDY, Asked, Reply, answered, ask
from tests.support.ports import free_port
from tests.support.releases import Release
from tests.support.routers import healthy
from tests.support.servers import program, serve_words

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
SETTINGS: Mapping[str, Any] = {"mode": "push", "lease_seconds": 20.0, "handshake_timeout": 20.0}
PREFILL: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
CLIENTS = 2


@dataclass
class Host:
    """A host with a kvd, a prefiller and a decoder, each of which is ended and started anew at the same addresses."""

    name: str
    folder: Path
    model: Path
    peer_port: int
    other_port: int
    metrics_port: int
    kvd: Release | None = None
    engines: Release | None = None
    urls: dict[str, str] = field(default_factory=dict)
    running: dict[str, contextlib.ExitStack] = field(default_factory=dict)

    @classmethod
    def pair(cls, folder: Path, model: Path) -> tuple[Host, Host]:
        """Two hosts that know of each other; nothing runs yet."""
        one, other = free_port(), free_port()
        return (
            cls("a", folder, model, one, other, free_port()),
            cls("b", folder, model, other, one, free_port()),
        )

    @property
    def metrics(self) -> str:
        """Where its kvd's metrics are."""
        return f"http://127.0.0.1:{self.metrics_port}"

    @property
    def runtime(self) -> Path:
        """Where its kvd's sockets are."""
        return self.folder / self.name

    def start_kvd(self, release: Release) -> None:
        """Run that version's kvd; what ran before is ended first."""
        self.stop("kvd")
        self.runtime.mkdir(mode=0o750, exist_ok=True)
        state = self.runtime / "state"
        if self.kvd is not None and release.ledger < self.kvd.ledger:  # as docs/versions.md says
            state.rename(state.with_name(f"state-of-{self.kvd.ledger}"))
        config = self.runtime / "kvd.yaml"
        peers = {"listen": f"127.0.0.1:{self.peer_port}", "connect": [f"127.0.0.1:{self.other_port}"]}
        settings = {"peer": peers, "metrics": {"listen": f"127.0.0.1:{self.metrics_port}"}}
        config.write_text(json.dumps(settings))  # JSON is YAML
        words = [sys.executable, "-m", "kvd.service", "--config", str(config)]
        words += ["--runtime-dir", str(self.runtime), "--state-dir", str(state)]
        spec = EngineSpec(model=self.model, work_dir=self.runtime, log_path=self.runtime / "kvd.log")
        self._run(
            "kvd", words, self.runtime / "kvd.log", environment(spec, self.runtime) | release.environment
        )
        self.kvd = release
        wait_for(self._answers, 60.0)

    def start_engines(self, release: Release) -> None:
        """Run both engines with that version's connector; `ready` waits for them."""
        for role, kv_role in ROLES.items():
            self.stop(role)
            name = f"{role}-{self.name}"
            port = int(self.urls[role].rpartition(":")[2]) if role in self.urls else free_port()
            self.urls[role] = f"http://127.0.0.1:{port}"
            config = {
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": "kvd.vllm",
                "kv_role": kv_role,
                "engine_id": name,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"runtime_dir": str(self.runtime), **SETTINGS},
            }
            spec = EngineSpec(
                model=self.model,
                work_dir=self.folder / f"{name}-work",
                log_path=self.folder / f"{name}.log",
                cache_dir=found_out(self.folder),
                # vLLM closes connections that were idle for 5 s, while the router may be sending on one.
                env={"TORCHDYNAMO_DISABLE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "900"},
            )
            sockets = self.folder / f"{role[0]}{self.name}"
            sockets.mkdir(exist_ok=True)
            words = serve_words(self.model, port, config, dtype="float32", kv_cache_memory_bytes=256 << 20)
            self._run(role, words, spec.log_path, environment(spec, sockets) | release.environment)
        self.engines = release

    def ready(self) -> None:
        """Wait until both engines answer."""
        for url in self.urls.values():
            wait_for(lambda url=url: healthy(url), 400.0)  # type: ignore[misc]

    def stop(self, what: str) -> None:
        """End its kvd, or one of its engines."""
        if what in self.running:
            self.running.pop(what).close()

    def close(self) -> None:
        """End all of it."""
        for what in list(self.running):
            self.stop(what)

    def ask(self, message: Message) -> Message:
        """One question to its kvd, which must speak this version's wire."""
        with connect(self.runtime, 30.0) as operator:
            return operator.ask(message)

    def engine(self, role: str) -> EngineRow:
        """One of its engines, as its kvd knows it."""
        rows = cast("EngineList", self.ask(ListEngines())).rows
        return next(row for row in rows if row.local and row.engine.engine_id == f"{role}-{self.name}")

    def records(self, **wanted: Any) -> list[TransferRecord]:
        """What its ledger has, newest first."""
        rows = cast("TransferList", self.ask(ListTransfers(limit=1000, **wanted))).rows
        return [row.record for row in rows]

    def _answers(self) -> bool:
        try:
            self.ask(GetStatus())
        except (RefusedByDaemon, ProtocolError):  # another version's: it serves
            return True
        except ClientError:
            return False
        return True

    def _run(self, what: str, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(program(words, log, env))
        self.running[what] = stack


@dataclass(frozen=True)
class Answer:
    """One client's answer, with what was right, and the phase in which it was asked for."""

    phase: str
    reply: Reply
    right: Reply


class Load:
    """Clients that ask one prompt after the other, through whichever router there is."""

    def __init__(self, right: Mapping[tuple[int, ...], Reply]) -> None:
        self.answers: list[Answer] = []
        self.phase = "before"
        self._right = list(right.items())
        self._url = ""
        self._stop = False
        self._in_flight: dict[str, int] = {}
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]

    def start(self, url: str) -> None:
        """Begin, through the router at a URL."""
        self._url = url
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the answers that are awaited, and ask for no more."""
        with self._changed:
            self._stop = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def through(self, url: str) -> None:
        """Ask there from now on; returns when nothing is under way elsewhere."""
        with self._changed:
            self._url = url
            assert self._changed.wait_for(
                lambda: not any(n for at, n in self._in_flight.items() if at != url), 300
            )

    def more(self, count: int, phase: str) -> None:
        """Wait until so many requests were asked for and answered from now on; they belong to that phase."""
        with self._changed:
            self.phase = phase
            assert self._changed.wait_for(lambda: sum(a.phase == phase for a in self.answers) >= count, 300)

    def _ask(self, number: int) -> None:
        while True:
            with self._changed:
                if self._stop:
                    return
                url, phase = self._url, self.phase
                self._in_flight[url] = self._in_flight.get(url, 0) + 1
            prompt, right = self._right[number % len(self._right)]
            number += CLIENTS
            reply = ask(url, Asked(COMPLETIONS, {"prompt": list(prompt)}))
            with self._changed:
                self._in_flight[url] -= 1
                self.answers.append(Answer(phase, reply, right))
                self._changed.notify_all()


@dataclass
class Fleet:
    """Both hosts, the router in front of them, and the load."""

    hosts: tuple[Host, Host]
    folder: Path
    load: Load
    router: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def serve(self, *hosts: Host) -> None:
        """Put a router before these hosts' engines alone, and have all clients ask it."""
        before, self.router = self.router, contextlib.ExitStack()
        url = self.router.enter_context(routed(hosts, self.folder))
        self.load.through(url)
        before.close()

    def roll(self, release: Release) -> Iterator[str]:
        """Bring one host after the other to a version, its kvd first; yields after each step what now runs."""
        for host in self.hosts:
            (other,) = (one for one in self.hosts if one is not host)
            host.start_kvd(release)
            yield f"{host.name}: the kvd is {release.name}, its engines are not yet"
            self.serve(other)
            host.start_engines(release)
            host.ready()
            self.serve(*self.hosts)
            yield f"{host.name} is {release.name}"


@contextlib.contextmanager
def routed(hosts: Sequence[Host], folder: Path) -> Iterator[str]:
    """The URL of the example router in front of all engines of these hosts.

    It takes the first of those that have as little to do, so each prompt goes from one host to the other.
    """
    port = free_port()
    words = [sys.executable, str(ROOT / "examples" / "router.py"), "--port", str(port)]
    for host in hosts:
        words += ["--prefill", host.urls["prefill"]]
    for host in reversed(hosts):
        words += ["--decode", host.urls["decode"]]
    with program(words, folder / f"router-{port}.log"):
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: healthy(url), 60.0)
        yield url


def prefilled(host: Host, prompt: Sequence[int], params: Mapping[str, Any] = PREFILL) -> dict[str, Any]:
    """What a host's prefiller gives for a decoder."""
    body = {**GREEDY, "prompt": list(prompt), "max_tokens": 1, "kv_transfer_params": dict(params)}
    connection, response = answered(host.urls["prefill"], COMPLETIONS, body)
    with contextlib.closing(connection):
        assert response.status == 200
        params = json.loads(response.read())["kv_transfer_params"]
    return dict(params or {})


def decoded(host: Host, prompt: Sequence[int], params: Mapping[str, Any] | None) -> Reply:
    """A host's decoder's answer to a prompt."""
    more = {} if params is None else {"kv_transfer_params": params}
    return ask(host.urls["decode"], Asked(COMPLETIONS, {"prompt": list(prompt)}), **more)


def scraped(url: str) -> str:
    """The metrics of a server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:  # noqa: S310 - a server of ours
        return str(response.read().decode())
