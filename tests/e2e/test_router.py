"""Two real `vllm serve` processes: the example router in front of them, what it hands on, and `kvctl verify`."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo.deployment import engine_id, transfer_config
from kvctl.demo.engine_spec import EngineSpec, environment
from kvctl.processes.daemons import Kvd, two_hosts
from tests.support.collectors import Collector, collector
from tests.support.daemons import ROOT, wait_for
from tests.support.deployments import PATIENT, counter, found_out, prompt_of, transfers
from tests.support.servers import CALM, program, serve_words, server
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ANSWER = 24
MODES = ("pull", "push")
OF_STOCK = {"backends": ["UCX"], "num_threads": 4, "enforce_handshake_compat": True}
"""What somebody may have left of a stock connector's settings."""


@dataclass(frozen=True)
class Servers:
    """Two servers beside their kvds, a router for each mode, and a collector of all traces; ports on this host."""

    its: Collector
    hosts: tuple[Kvd, Kvd]
    prefill: int
    decode: int
    routers: dict[str, int]


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def serve(
    host: Kvd, role: str, model: Path, folder: Path, traces: str
) -> tuple[int, contextlib.AbstractContextManager[int]]:
    """`vllm serve` on a host, and its port."""
    port = free_port()
    spec = EngineSpec(
        model=model,
        work_dir=folder / host.name,
        log_path=folder / f"{host.name}.log",
        cache_dir=found_out(folder),
        env={**CALM, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},  # vLLM takes gRPC otherwise
    )
    config = transfer_config(host, engine_id(host), role, extra={**PATIENT, **OF_STOCK, "mode": "push"})
    words = serve_words(model, port, config, otlp_traces_endpoint=traces)
    sockets = folder / f"{host.name}-tmp"
    sockets.mkdir()
    return port, server(words, spec.log_path, environment(spec, sockets))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("serve")
    model = write_model("llama", folder / "models")
    with contextlib.ExitStack() as stack:
        its = stack.enter_context(collector())
        hosts = stack.enter_context(two_hosts(folder, {"KVD_TRACING_ENDPOINT": its.url}))
        ports = []
        for host, role in zip(hosts, ("kv_producer", "kv_consumer"), strict=True):
            port, running = serve(host, role, model, folder, its.url)
            stack.enter_context(running)
            ports.append(port)
        for port, host in zip(ports, hosts, strict=True):
            wait_for(lambda port=port: healthy(port), 400.0)  # type: ignore[misc]
            assert (folder / f"{host.name}.log").exists()
        prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
        kvd = hosts[0].endpoint()
        routers = {}
        for mode in MODES:
            source = f"{prefill},{engine_id(hosts[0])},{kvd.host}:{kvd.port}" if mode == "push" else prefill
            routers[mode] = free_port()
            words = [
                sys.executable,
                str(ROOT / "examples" / "router.py"),
                "--mode",
                mode,
                "--prefill",
                source,
            ]
            words += ["--decode", decode, "--port", str(routers[mode])]
            stack.enter_context(program(words, folder / f"router-{mode}.log"))
        for port in routers.values():
            wait_for(lambda port=port: healthy(port), 30.0)  # type: ignore[misc]
        yield Servers(its, hosts, ports[0], ports[1], routers)


def healthy(port: int) -> bool:
    """Whether the server answers that it is; asked ten times a second at most."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        time.sleep(0.1)
        return False


def asked(
    port: int, path: str = "/v1/completions", headers: Mapping[str, str] | None = None, **body: Any
) -> dict[str, Any]:
    """The answer to one request."""
    greedy = {"model": "tiny", "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(greedy | body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310 - http, as written above
        text = response.read().decode()
    if not body.get("stream"):
        answer: dict[str, Any] = json.loads(text)
        return answer
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return {"events": [json.loads(line) for line in lines[:-1]]}


def done_since(servers: Servers, before: int) -> list[Any]:
    """Transfers after so many, once there is one."""
    return wait_for(lambda: transfers(servers.hosts[1])[: len(transfers(servers.hosts[1])) - before], 30.0)


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_decoders_own_whole_or_as_a_stream(servers: Servers, mode: str) -> None:
    for number, stream in enumerate((False, True)):
        prompt = prompt_of(700, seed=20 + number + 2 * MODES.index(mode))
        before = len(transfers(servers.hosts[1]))
        through = asked(servers.routers[mode], prompt=prompt, stream=stream)
        (record,) = done_since(servers, before)
        assert (record.state, record.mode, record.cause) == ("done", mode, "")
        alone = asked(servers.decode, prompt=prompt)["choices"][0]["text"]
        if stream:
            assert len(through["events"]) > 1
            assert "".join(event["choices"][0]["text"] for event in through["events"]) == alone
        else:
            assert through["choices"][0]["text"] == alone


@pytest.mark.parametrize("mode", MODES)
def test_the_engines_own_metrics_count_what_came_from_the_other(servers: Servers, mode: str) -> None:
    def counted() -> tuple[float, float, float]:
        from_peers = metric(servers.decode, "vllm:prompt_tokens_cached_by_source_total", 'source="p2p"')
        moved = metric(servers.decode, "vllm:kvd_bytes_transferred_count")
        return moved, metric(servers.decode, "vllm:kvd_bytes_transferred_sum"), from_peers

    before, transferred = counted(), len(transfers(servers.hosts[1]))
    asked(servers.routers[mode], prompt=prompt_of(700, seed=50 + MODES.index(mode)))
    (record,) = done_since(servers, transferred)
    wait_for(lambda: counted()[0] > before[0], 30.0)
    moved, nbytes, tokens = (now - then for now, then in zip(counted(), before, strict=True))
    assert (moved, nbytes) == (1, record.bytes)
    assert tokens >= 700 - 1


@pytest.mark.parametrize("mode", MODES)
def test_chats_are_handed_over_too(servers: Servers, mode: str) -> None:
    before = len(transfers(servers.hosts[1]))
    messages = [{"role": "user", "content": f"a long story in mode {mode}. " * 20}]
    through = asked(servers.routers[mode], "/v1/chat/completions", messages=messages)
    assert through["choices"][0]["message"]["content"]
    assert [record.mode for record in done_since(servers, before)] == [mode]


@pytest.mark.parametrize("mode", MODES)
def test_a_clients_trace_has_the_spans_of_both_servers_and_of_both_kvds(servers: Servers, mode: str) -> None:
    trace, client = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    headers = {"traceparent": f"00-{trace}-{client}-01"}
    prompt = prompt_of(700, seed=60 + MODES.index(mode))
    through = asked(servers.routers[mode], headers=headers, prompt=prompt)

    prefiller, decoder = servers.its.sides(trace, 60.0)
    assert decoder.attributes["kv_transfer.mode"] == mode
    assert decoder.attributes["kv_transfer.state"] == "done"
    assert decoder.attributes["kv_transfer.bytes"] > 0
    wait_for(lambda: len(servers.its.of(trace, "llm_request")) == 2, 60.0)
    requests = servers.its.of(trace, "llm_request")
    assert {span.parent for span in (prefiller, decoder, *requests)} == {client}
    assert through["choices"][0]["text"] == asked(servers.decode, prompt=prompt)["choices"][0]["text"]


@pytest.mark.parametrize("mode", MODES)
def test_a_client_that_goes_away_ends_its_request_on_the_decoder(servers: Servers, mode: str) -> None:
    most = 1400
    body = {"model": "tiny", "prompt": prompt_of(600, seed=30), "max_tokens": most, "stream": True}
    before = metric(servers.decode, "vllm:generation_tokens_total")
    connection = HTTPConnection("127.0.0.1", servers.routers[mode], timeout=300)
    text = json.dumps(body | {"ignore_eos": True})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.read(1)
    response.close()
    connection.close()
    wait_for(lambda: running(servers.decode) == 0, 60.0)
    assert 0 < metric(servers.decode, "vllm:generation_tokens_total") - before < most
    assert counter(servers.hosts[0], "push.failed") == 0


@pytest.mark.parametrize("way", ["prefill", *MODES])
def test_kvctl_verify_finds_answers_right_with_every_miss(servers: Servers, way: str) -> None:
    port = servers.prefill if way == "prefill" else servers.routers[way]
    words = ("--prefill" if way == "prefill" else "--router", f"http://127.0.0.1:{port}")

    code, found = verify(servers, *words, "--yes")

    assert (code, found["wrong"]) == (0, 0), found
    assert [run["run"] for run in found["runs"]] == ["reuse", "before", "flight", "layers"]
    assert [run["load"] for run in found["runs"]] == ["done", *["recovered"] * 3]
    assert all(run["equals"] for run in found["runs"])
    assert all(run["recovery"] > 0 for run in found["runs"][1:])
    modes = [record.mode for record in transfers(servers.hosts[1])[:4]]
    assert modes == ["push" if way == "push" else "pull"] * 4


def test_kvctl_verify_is_1_where_nothing_is_handed_over_and_4_where_nobody_answers(servers: Servers) -> None:
    code, found = verify(servers, "--router", f"http://127.0.0.1:{servers.decode}")
    assert (code, [run["load"] for run in found["runs"]]) == (1, ["not seen"])
    code, error = verify(servers, "--router", f"http://127.0.0.1:{free_port()}")
    assert (code, error["kind"]) == (4, "Error")


def verify(servers: Servers, *words: str) -> tuple[int, Any]:
    """Exit code and document of `kvctl verify` with one prompt, on the decoder's host."""
    command = [sys.executable, "-m", "kvctl", "verify", "--endpoint", f"http://127.0.0.1:{servers.decode}"]
    command += ["--prompts", "1", "--prompt-tokens", "600", "--max-tokens", "8", "-o", "json"]
    command += ["--runtime-dir", str(servers.hosts[1].directory), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, json.loads(done.stdout or done.stderr.splitlines()[-1])


def running(port: int) -> float:
    """Requests that a server has now."""
    return metric(port, "vllm:num_requests_running") + metric(port, "vllm:num_requests_waiting")


def metric(port: int, name: str, label: str = "") -> float:
    """A metric of a server, summed over labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line
    )
