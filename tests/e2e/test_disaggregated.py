"""Requests that are quietly not handed over: real servers, the example router, and what stands between it and them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvctl.processes.daemons import Kvd
from tests.e2e.test_router import Servers, asked, free_port, healthy, servers
from tests.support.daemons import ROOT, wait_for
from tests.support.deployments import prompt_of
from tests.support.servers import program

__all__ = ["servers"]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 10
TOKENS = 300
MINUTE = 60.0
"""Seconds of traffic after which doctor must know."""

Body = dict[str, Any]


def doctor(host: Kvd) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the checks of requests by code."""
    words = ["doctor", "--quick", "-o", "json", "--runtime-dir", str(host.directory)]
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", *words], capture_output=True, text=True, check=False, timeout=120
    )
    checks = json.loads(done.stdout)["checks"]
    return done.returncode, {check["code"]: check for check in checks if "DISAGGREGATED" in check["code"]}


def finding(host: Kvd, since: float, *reasons: str) -> dict[str, str]:
    """Doctor's finding with one of these reasons, which it must have within a minute of the first request."""

    def look() -> dict[str, str] | None:
        code, found = doctor(host)
        check = found.get("NOT_DISAGGREGATED", {})
        assert code == (1 if check.get("state") == "failed" else 0)
        return check if check.get("reason") in reasons else None

    return wait_for(look, max(1.0, since + MINUTE - time.monotonic()))


def traffic(port: int, seed: int) -> float:
    """Some requests, one after the other; when the first one began."""
    began = time.monotonic()
    for number in range(REQUESTS):
        answer = asked(port, prompt=prompt_of(TOKENS, seed=seed + number), max_tokens=2)
        assert answer["choices"][0]["text"]
    return began


def become(hosts: tuple[Kvd, Kvd], state: str) -> None:
    """Wait until doctor says so of both hosts: ok, or skipped once what was is no longer of late."""
    for host in hosts:
        wait_for(lambda host=host: doctor(host)[1].get("DISAGGREGATED", {}).get("state") == state, 120.0)  # type: ignore[misc]


@contextlib.contextmanager
def between(
    port: int, asks: Callable[[Body], Body] = lambda b: b, answers: Callable[[Body], Body] = lambda b: b
) -> Iterator[int]:
    """Something in front of a server that changes what is asked of it, or what it answers; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{self.path}",
                json.dumps(asks(body)).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as response:  # noqa: S310 - http, as written above
                answer = json.dumps(answers(json.load(response))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def router(prefill: int, decode: int, log: Path) -> Iterator[int]:
    """The example router, unmodified; its port."""
    port = free_port()
    words = [sys.executable, str(ROOT / "examples" / "router.py"), "--mode", "pull", "--port", str(port)]
    words += ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    with program(words, log):
        wait_for(lambda: healthy(port), 30.0)
        yield port


def without(name: str) -> Callable[[Body], Body]:
    """Drops an entry."""
    return lambda body: {key: value for key, value in body.items() if key != name}


@pytest.fixture(scope="module", autouse=True)
def introduced(servers: Servers) -> None:
    """The hosts know each other from a request that was handed over; else doctor knows only the engines of its own."""
    asked(servers.routers["pull"], prompt=prompt_of(TOKENS, seed=99), max_tokens=2)
    become(servers.hosts, "ok")  # it is counted


def test_requests_that_are_handed_over_are_no_finding(servers: Servers) -> None:
    for mode, seed in (("pull", 100), ("push", 120)):
        traffic(servers.routers[mode], seed)
    counts = (2 * REQUESTS, 2 * REQUESTS + 1)  # with the one that introduced them, if that is still of late

    def counted() -> bool:
        found = [doctor(host)[1] for host in servers.hosts]
        assert all("NOT_DISAGGREGATED" not in checks for checks in found), found
        prefilled, loaded = (checks["DISAGGREGATED"]["found"] for checks in found)
        return any(f" {n} prefills " in prefilled and f" {n} loaded" in loaded for n in counts)

    wait_for(counted, 20.0)


def test_a_router_that_drops_the_params_is_named_on_both_sides(servers: Servers, tmp_path: Path) -> None:
    strip = between(servers.prefill, answers=without("kv_transfer_params"))
    with strip as stripped, router(stripped, servers.decode, tmp_path / "router.log") as port:
        began = traffic(port, 200)
    decoder = finding(servers.hosts[1], began, "ROUTER_DROPS_PARAMS")
    assert f"{REQUESTS} of " in decoder["found"]
    assert "come without kv_transfer_params, and nobody claims what is kept by" in decoder["found"]
    assert "docs/routers.md" in decoder["hint"]
    # Its kvd has a link to the decoder's where something was pushed lately, and else cannot know what that gets.
    prefiller = finding(servers.hosts[0], began, "ROUTER_DROPS_PARAMS", "UNCLAIMED")
    assert "went to no decoder: nobody claims them" in prefiller["found"]


@pytest.mark.matrix
def test_a_finding_ends_with_what_it_is_of(servers: Servers) -> None:
    become(servers.hosts, "skipped")


@pytest.mark.matrix
def test_a_router_that_asks_the_prefiller_for_no_handover_is_named(servers: Servers, tmp_path: Path) -> None:
    become(servers.hosts, "skipped")
    strip = between(servers.prefill, asks=without("kv_transfer_params"))
    with strip as stripped, router(stripped, servers.decode, tmp_path / "router.log") as port:
        began = traffic(port, 300)
    for host in reversed(servers.hosts):
        found = finding(host, began, "ROUTER_ASKS_FOR_NO_HANDOVER")
        assert found["state"] == "failed"
        assert f"{REQUESTS} of {REQUESTS} " in found["found"]
    become(servers.hosts, "skipped")


@pytest.mark.matrix
def test_requests_that_go_straight_to_the_decoder_are_named(servers: Servers) -> None:
    began = traffic(servers.decode, 400)
    found = finding(servers.hosts[1], began, "ROUTER_ASKS_NO_PREFILLER")
    assert found["state"] == "failed"
    assert "DISAGGREGATED" in doctor(servers.hosts[0])[1]
