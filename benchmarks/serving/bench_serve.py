"""`vllm bench serve` through a router, in front of `vllm serve`: as users measure a deployment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.fleet import ROOT, STOCK, Fleet, PairSpec, engine_specs, free_port
from benchmarks.serving.halting import cores_below, going, standing_still
from benchmarks.serving.tables import BETWEEN_TARGET, FIRST_TARGET
from kvctl.demo.engine_spec import EngineSpec, engine_arguments, environment
from tests.support.routers import FETCHED, VLLM_ROUTER, routed
from tests.support.servers import CALM, program

START_SECONDS = 200.0
RUN_SECONDS = 60.0
EXAMPLE = "examples/router.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """What `vllm bench serve` is asked for: prompts of ``tokens`` tokens at ``rate`` requests a second."""

    tokens: int
    answer: int
    rate: float
    prompts: int

    def options(self, url: str, model: Path, seed: int) -> list[str]:
        """Its command line."""
        goodput = [f"ttft:{FIRST_TARGET * 1e3:g}", f"tpot:{BETWEEN_TARGET * 1e3:g}"]
        named = {
            "--backend": "openai",
            "--base-url": url,
            "--model": model,
            "--dataset-name": "random",
            "--random-input-len": self.tokens,
            "--random-output-len": self.answer,
            "--request-rate": self.rate,
            "--num-prompts": self.prompts,
            "--seed": seed,
            "--percentile-metrics": "ttft,tpot,itl",
            "--metric-percentiles": "50,99",
        }
        words = [str(word) for pair in named.items() for word in pair]
        return [*words, "--ignore-eos", "--disable-tqdm", "--goodput", *goodput]


@dataclass(frozen=True, slots=True)
class ServedPair:
    """Where a router in front of two servers listens."""

    spec: PairSpec
    router: str
    url: str
    model: Path
    servers: tuple[int, ...]


RUNS = {
    "cuda": (
        BenchRun(tokens=4096, answer=24, rate=10, prompts=30),
        BenchRun(tokens=4096, answer=24, rate=30, prompts=75),
    ),
    "cpu": (BenchRun(tokens=64, answer=8, rate=2, prompts=3),),
}


def bench_serve(fleet: Fleet, specs: Sequence[PairSpec], rounds: int) -> None:
    """All runs through all routers in turns. Raises `RuntimeError` where not one pair served."""
    with contextlib.ExitStack() as stack:
        begun = [_begin(fleet, spec, stack) for spec in specs]
        until = time.monotonic() + START_SECONDS * (1 if fleet.device == "cuda" else 3)
        serving: list[ServedPair] = []
        for ready in begun:
            serving += _up(fleet, ready, until, stack)
        if not serving:
            raise RuntimeError("no pair of servers came up")
        busy = {pair.spec.name: cores_below(pair.servers) for pair in serving if pair.spec.way in STOCK}
        with _clients(fleet) as ask, standing_still(busy):
            # The first round of each does not count: it compiles kernels and connects.
            for number in range(-1, rounds):
                for run in RUNS[fleet.device]:
                    at = max(number, 0) % len(serving)
                    for pair in (*serving[at:], *serving[:at]):
                        with going(busy, pair.spec.name):
                            _one(fleet, pair, run, number, ask)


@dataclass(frozen=True, slots=True)
class _Starting:
    spec: PairSpec
    ids: tuple[str, str]
    urls: tuple[str, ...]
    model: Path
    servers: tuple[int, ...]


def _begin(fleet: Fleet, spec: PairSpec, stack: contextlib.ExitStack) -> _Starting:
    ids, specs, _ = engine_specs(fleet, spec)
    urls, servers = [], []
    for one in specs:
        port = free_port()
        env = {**one.env, "PYTHONPATH": os.pathsep.join([CALM["PYTHONPATH"], one.env["PYTHONPATH"]])}
        sockets = one.work_dir / "tmp"
        sockets.mkdir(parents=True)
        one.log_path.parent.mkdir(parents=True, exist_ok=True)
        calm = environment(dataclasses.replace(one, env=env), sockets)
        servers.append(stack.enter_context(program(words_of(one, port), one.log_path, calm)))
        urls.append(f"http://127.0.0.1:{port}")
    return _Starting(spec, ids, tuple(urls), specs[0].model, tuple(servers))


def words_of(spec: EngineSpec, port: int) -> list[str]:
    """`vllm serve` with the arguments that an engine of the fleet would have."""
    arguments = {"enforce_eager": True, "seed": 0} | engine_arguments(spec)
    model = str(arguments.pop("model"))
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port)]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*words, "--host", "127.0.0.1"]


def _up(fleet: Fleet, ready: _Starting, until: float, stack: contextlib.ExitStack) -> list[ServedPair]:
    """A router in front of the servers once they are up; those that are not are noted."""
    spec = ready.spec
    while not all(map(_healthy, ready.urls)):
        if time.monotonic() > until:
            fleet.report.note("not started", pair=spec.name, error="no answer in time")
            fleet.report.say(f"{spec.name}: its servers did not come up")
            return []
        time.sleep(0.5)
    fleet.report.say(f"{spec.name}: its servers are up")
    found = []
    for router in [EXAMPLE, *[VLLM_ROUTER] * (spec.mode == "pull" and FETCHED.exists())]:
        folder = fleet.folder / f"router-{ready.ids[0]}"
        folder.mkdir(exist_ok=True)
        if router == EXAMPLE:
            url = stack.enter_context(_example(fleet, ready, folder))
        else:
            url = stack.enter_context(routed(router, ready.urls[:1], ready.urls[1:], folder))
        found.append(ServedPair(spec, router, url, ready.model, ready.servers))
    return found


@contextlib.contextmanager
def _example(fleet: Fleet, ready: _Starting, folder: Path) -> Iterator[str]:
    kvd, port = fleet.hosts[0].endpoint(), free_port()
    prefill, decode = ready.urls
    if ready.spec.mode == "push":
        prefill += f",{ready.ids[0]},{kvd.host}:{kvd.port}"
    words = [sys.executable, str(ROOT / EXAMPLE), "--mode", ready.spec.mode, "--prefill", prefill]
    with program([*words, "--decode", decode, "--port", str(port)], folder / "example.log"):
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 30.0
        while not _healthy(url) and time.monotonic() < until:
            time.sleep(0.1)
        yield url


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:  # noqa: S310 - a server of ours
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


Ask = Any
"""Takes a command line, gives the result; raises `RuntimeError` or `TimeoutError`."""


@contextlib.contextmanager
def _clients(fleet: Fleet) -> Iterator[Ask]:
    """The process that runs `vllm bench serve`, as something to call."""
    log = fleet.folder / "clients"
    log.mkdir(exist_ok=True)
    said: queue.Queue[str] = queue.Queue()
    with (log / "bench.log").open("w", encoding="utf-8") as complaints:
        process: Any = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.clients"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True,
        )  # fmt: skip
        reading = threading.Thread(target=_read, args=(process.stdout, said), daemon=True)
        reading.start()

        def ask(words: Sequence[str]) -> dict[str, Any]:
            process.stdin.write(json.dumps(list(words)) + "\n")
            process.stdin.flush()
            try:
                line = said.get(timeout=RUN_SECONDS * (1 if fleet.device == "cuda" else 5))
            except queue.Empty:
                raise TimeoutError("vllm bench serve gave no result in time") from None
            if not line:
                raise RuntimeError("vllm bench serve ended")
            return dict(json.loads(line))

        try:
            yield ask
        finally:
            process.kill()
            process.wait()


def _read(lines: Any, said: queue.Queue[str]) -> None:
    for line in lines:
        if line.startswith("RESULT "):
            said.put(line.removeprefix("RESULT "))
    said.put("")


def _one(fleet: Fleet, pair: ServedPair, run: BenchRun, number: int, ask: Ask) -> None:
    try:
        found = ask(run.options(pair.url, pair.model, 1000 * (number + 1) + int(run.rate)))
    except TimeoutError as error:
        fleet.report.note("failed", pair=pair.spec.name, work=f"bench serve {number}", error=str(error))
        return
    spec = pair.spec
    fleet.report.note(
        "bench serve", kind=spec.kind, way=spec.way, mode=spec.mode, options=spec.options, gpus=spec.gpus,
        router=pair.router, tokens=run.tokens, rate=run.rate, round=number, note="steady" if number >= 0 else "warm",
        **found,
    )  # fmt: skip
    fleet.report.say(f"{spec.name} {pair.router} {run.rate:g}/s: {found.get('median_ttft_ms')} ms")
