"""`vllm serve` processes behind routers: a prefiller, decoders, and an engine by itself that says what is right."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kvctl.demo.deployment import transfer_config
from kvctl.demo.engine_spec import EngineSpec, environment
from kvctl.processes.daemons import Kvd, two_hosts
from kvd.wire.query import EngineList, ListEngines
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from tests.support.daemons import wait_for
from tests.support.deployments import found_out
from tests.support.openai_client import COMPLETIONS, GREEDY, Asked, Reply, agree, answered, ask
from tests.support.ports import free_port
from tests.support.router_cases import Case
from tests.support.routers import healthy, routed
from tests.support.servers import CALM, serve_words, server
from tests.support.tiny_models import write_model

LEASE = 20.0
TIMEOUTS: Mapping[str, Any] = {"lease_seconds": LEASE, "handshake_timeout": 60.0, "load_timeout": 60.0}
"""Settings of the engines. Whoever waits for one of these times needs longer than `AT_MOST`."""
MANY_AT_MOST = 55.0
"""The same where 64 requests came at once."""
AT_MOST = 15.0
"""Seconds within which one request is answered that has the engines for itself; they answer in about one."""


@dataclass
class Fleet:
    """Servers by their URLs, and the kvds beside the prefiller and the decoders."""

    hosts: tuple[Kvd, Kvd]
    prefill: str
    decodes: tuple[str, ...]
    single: str
    folder: Path
    stack: contextlib.ExitStack
    right: dict[str, Reply] = field(default_factory=dict)
    routers: dict[tuple[str, ...], str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    kept: dict[str, list[Reply]] = field(default_factory=dict)

    def router(self, name: str, prefill: str = "") -> str:
        """The URL of a router in front of a prefiller, this fleet's unless named, and of all decoders; started once."""
        key = (name, prefill or self.prefill)
        if key not in self.routers:
            running = routed(name, [prefill or self.prefill], self.decodes, self.folder)
            self.routers[key] = self.stack.enter_context(running)
        return self.routers[key]

    def single_says(self, asked: Asked) -> Reply:
        """What the engine by itself answers; asked once."""
        key = repr(asked)
        if key not in self.right:
            self.right[key] = ask(self.single, asked)
            assert self.right[key].status == 200, self.right[key].error
        return self.right[key]

    def handed_on(self, prompt: list[int]) -> dict[str, Any]:
        """What the prefiller gives for a prompt, as a router hands it to a decoder."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {**GREEDY, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": asked}
        connection, response = answered(self.prefill, COMPLETIONS, body)
        with contextlib.closing(connection):
            params: dict[str, Any] = json.loads(response.read())["kv_transfer_params"]
        return params

    def newest(self) -> int:
        """The number of the newest row in the decoders' ledger."""
        rows = cast("TransferList", self.hosts[1].ask(ListTransfers(limit=1))).rows
        return rows[0].seq if rows else 0

    def loaded(self, after: int) -> list[TransferRecord]:
        """Loads that are done, by the decoders' ledger, newer than a row."""
        rows = cast(
            "TransferList", self.hosts[1].ask(ListTransfers(after=after, limit=1000, state="done"))
        ).rows
        return [row.record for row in rows]

    def answers(self, router: str, case: Case) -> None:
        """A request through a router is answered as one engine does, and served by as many loads as it should be."""
        right, before = self.single_says(case.asked), self.newest()
        same(ask(self.router(router), case.asked), right)
        wait_for(lambda: len(self.loaded(before)) >= case.least, 10.0)
        assert len(self.loaded(before)) <= case.most

    def nothing_is_left(self) -> None:
        """Soon after the last lease has run out no engine holds a block."""
        wait_for(lambda: self.leases() == 0, LEASE + 15.0)
        for url in (self.prefill, *self.decodes):
            wait_for(lambda url=url: blocks_left(url) == 0, 30.0)  # type: ignore[misc]
            assert at_work(url) == 0

    def leases(self) -> int:
        """Leases that the prefiller's kvd knows."""
        rows = cast("EngineList", self.hosts[0].ask(ListEngines())).rows
        return sum(row.leases for row in rows if row.local)


@contextlib.contextmanager
def fleet(
    kind: str, folder: Path, *, decoders: int = 1, settings: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Fleet]:
    """Servers of a tiny model, ready; ``options`` are of `vllm serve`, ``settings`` of the connector, for all of them.

    Nothing waits for blocks: their memory holds also what is kept for decoders that never come.
    """
    options = {"kv_cache_memory_bytes": 256 << 20, **options}
    model = write_model(kind, folder / "models")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(folder))
        roles = {"prefill": (hosts[0], "kv_producer"), "single": (None, "")}
        roles |= {f"decode-{number}": (hosts[1], "kv_consumer") for number in range(decoders)}
        urls: dict[str, str] = {}
        pids: dict[str, int] = {}
        for name, (host, role) in roles.items():
            extra = {**TIMEOUTS, **(settings or {})}
            config = None if host is None else transfer_config(host, name, role, extra=extra)
            port = free_port()
            urls[name] = f"http://127.0.0.1:{port}"
            words = serve_words(model, port, config, **options)
            running = server(words, folder / f"{name}.log", _environment(name, model, folder))
            pids[urls[name]] = stack.enter_context(running)
        for url in urls.values():
            wait_for(lambda url=url: healthy(url), 400.0)  # type: ignore[misc]
        decodes = tuple(url for name, url in urls.items() if name.startswith("decode"))
        yield Fleet(hosts, urls["prefill"], decodes, urls["single"], folder, stack, pids=pids)


def same(reply: Reply, right: Reply, at_most: float = AT_MOST, what: str = "") -> None:
    """The answer is the right one, and nothing was waited for."""
    assert reply.status == 200, (reply.error, what)
    assert agree(reply.choices, right.choices), f"{what}\n{reply.choices}, and by itself\n{right.choices}"
    assert reply.usage == right.usage, f"{what}: {reply.usage}, and by itself {right.usage}"
    assert reply.seconds < at_most, f"{what}: answered after {reply.seconds:.1f} s"


def _environment(name: str, model: Path, folder: Path) -> dict[str, str]:
    spec = EngineSpec(
        model=model,
        work_dir=folder / name,
        log_path=folder / f"{name}.log",
        cache_dir=found_out(folder),
        # What vLLM compiles for its first log probabilities takes half a minute here. And it closes connections that
        # were idle for 5 s, while the proxies may be sending the next request on them: that is a 500, and nobody's KV.
        env={**CALM, "TORCHDYNAMO_DISABLE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "900"},
    )
    sockets = folder / f"{name}-tmp"
    sockets.mkdir()
    return environment(spec, sockets)


def metric(url: str, name: str, label: str = "") -> float:
    """A metric of a server, summed over labels, or over those with this one."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:  # noqa: S310 - a server of ours
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line
    )


def at_work(url: str) -> float:
    """Requests that a server has now."""
    return metric(url, "vllm:num_requests_running") + metric(url, "vllm:num_requests_waiting")


def blocks_left(url: str) -> float:
    """The part of a server's KV blocks that is held though nobody asks for anything.

    An engine frees blocks and says so in its steps, so it is given something to do. (Not one token: a prompt of one
    may kill vLLM 0.32's Gated DeltaNet on CPUs.)
    """
    assert ask(url, Asked(COMPLETIONS, {"prompt": [5] * 8, "max_tokens": 2})).status == 200
    wait_for(lambda: at_work(url) == 0, 30.0)
    return metric(url, "vllm:kv_cache_usage_perc")
