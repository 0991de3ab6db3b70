"""The routers that `.ci/setup routers` fetches, unmodified, in front of OpenAI servers."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.daemons import ROOT, wait_for
from tests.support.ports import free_port
from tests.support.servers import program

FETCHED = ROOT / ".builds" / "routers"
VLLM_ROUTER, TOY, MULTITURN = "vllm-router", "toy proxy", "multiturn proxy"
ROUTERS = (VLLM_ROUTER, TOY)
"""What is run with all kinds of requests. `MULTITURN` is like `TOY`, answers without log probabilities, and only the
first of several choices by itself."""
PROXIES = {TOY: "toy_proxy_server.py", MULTITURN: "disagg_proxy_multiturn.py"}
HEALTH = {VLLM_ROUTER: "/health", TOY: "/healthcheck", MULTITURN: "/health"}


def healthy(url: str, path: str = "/health") -> bool:
    """Whether the server answers that it is; asked ten times a second at most."""
    try:
        with urllib.request.urlopen(url + path, timeout=10) as response:  # noqa: S310 - a server of ours
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        time.sleep(0.1)
        return False


@contextlib.contextmanager
def routed(router: str, prefills: Sequence[str], decodes: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a router that runs in front of servers, given by their URLs; its log is in ``folder``."""
    assert FETCHED.exists(), f"{FETCHED} is missing: run .ci/setup routers"
    port = free_port()
    environment = dict(os.environ)
    if router == VLLM_ROUTER:
        paths = [str(FETCHED / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        words = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        words += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
        words += ["--port", str(port), "--prometheus-port", str(free_port())]
        for url in prefills:
            words += ["--prefill", url]
        for url in decodes:
            words += ["--decode", url]
    else:
        words = [sys.executable, str(FETCHED / "proxies" / PROXIES[router])]
        words += ["--host", "127.0.0.1", "--port", str(port)]
        for kind, urls in (("prefiller", prefills), ("decoder", decodes)):
            places = [urlsplit(url) for url in urls]
            words += [f"--{kind}-host", *(str(place.hostname) for place in places)]
            words += [f"--{kind}-port", *(str(place.port) for place in places)]
    with program(words, folder / f"{router.replace(' ', '-')}-{port}.log", environment):
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: healthy(url, HEALTH[router]), 60.0)
        yield url
