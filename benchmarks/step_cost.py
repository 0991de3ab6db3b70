"""What a connector takes of the steps of a decoder: without a load, with one that begins, and of the first token's.

    python benchmarks/step_cost.py [--tokens 512,4096] [--rounds 40] [--launches 300] [--backend direct] [--busy]
        [--json]

An engine without a model is stepped by hand (benchmarks/stepped_engine.py), once with KvdConnector and once with a
connector that has loaded everything at once. Requests take turns between them. Ours gets its KV from a prefiller in a
process of its own, with a real kvd.

*To the first token* is from a request's arrival, and has the load and all that it waits for. With `--busy` another
request of the same engine decodes meanwhile.

The first token's window begins as vLLM begins to schedule the step that needs the KV, and ends as its token is there:
that step, the launch of the one after it, and the results of one or two. Without `--busy` it has the load as well,
which is waited for there. What other threads of the process take of the
processor in it counts for itself, since each of them holds Python's lock meanwhile. Times are in microseconds.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.processes.daemons import launch
from tests.support.tiny_models import write_model

BLOCK, POOL, LONGEST = 16, 4000, 1 << 15
SETTLE = 0.02
"""Seconds of rest before each request, in which whatever is left of the one before ends."""
ANSWERED = 8
"""Tokens of an answer."""
BESIDE = 200
"""Tokens of the answer of one that decodes beside it."""
INSTANT = {"kv_connector": "InstantConnector", "kv_connector_module_path": "benchmarks.instant_connector"}
AFTER = 0.2
"""Seconds after the first token within which threads are still watched: until records are written."""


@dataclass
class Seen:
    """What one request took: seconds by part of each kind of step, and what threads had of the processor.

    ``wrong`` counts its blocks that were not the prefiller's when it had its first token; ``left`` is 1 where its load
    had not begun when its step did.
    """

    wrong: int = 0
    left: int = 0
    whole: float = 0.0
    window: float = 0.0
    own: float = 0.0
    between: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    others: dict[str, float] = field(default_factory=dict)
    later: dict[str, float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)


def configured(way: str, engine_id: str, role: str, folder: Path, backend: str) -> dict[str, Any]:
    """The configuration of a connector."""
    base = {"engine_id": engine_id, "kv_role": role}
    if way == "kvd":
        extra = {"runtime_dir": str(folder / "kvd"), "backend": backend}
        return base | {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd.vllm",
            "kv_connector_extra_config": extra,
        }
    return base | INSTANT


def engine(options: argparse.Namespace, config: dict[str, Any], folder: Path, **more: Any) -> Any:
    """An engine that is stepped by hand."""
    from benchmarks.stepped_engine import SteppedEngine

    return SteppedEngine(
        folder / "models" / "llama",
        config,
        block=BLOCK,
        pool=POOL,
        longest=LONGEST,
        launches=options.launches,
        **more,
    )


# --- the prefiller's process ---


def prefiller(options: argparse.Namespace, way: str, folder: Path, pipe: Connection) -> None:
    """Prefills each prompt that is asked for; answers with its params."""
    import torch

    from benchmarks.stepped_engine import one_process

    torch.set_num_threads(1)
    folder_here = folder / f"prefiller-{way}"
    folder_here.mkdir()
    with one_process(folder_here):
        made = engine(options, configured(way, f"p-{way}", "kv_producer", folder, options.backend), folder)
        made.number_blocks()
        pipe.send("ready")
        for number in itertools.count():
            while not pipe.poll(0.01):
                made.step()  # blocks of leases that ended are freed
            tokens = pipe.recv()
            if tokens is None:
                break
            pipe.send(_prefilled(made, f"p{number}", tokens))
        made.close()


def _prefilled(made: Any, name: str, tokens: list[int]) -> dict[str, Any]:
    made.arrive(name, tokens, {"do_remote_decode": True, "do_remote_prefill": False}, 1)
    while True:
        for answer in made.step():
            if answer.finish_reason is not None:
                return dict(answer.kv_transfer_params)


# --- the decoder ---


class Watched:
    """The parts of an engine's steps, and what threads take of the processor."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = defaultdict(list)
        self.began = 0.0

    @contextlib.contextmanager
    def around(self, part: str) -> Iterator[None]:
        """A part of a step."""
        began = time.perf_counter()
        if part == "schedule":
            self.began = began
        try:
            yield
        finally:
            self.seen[part].append(time.perf_counter() - began)


def on_processor() -> dict[str, float]:
    """Seconds that each thread of this process but this one has had of the processor."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.ident is not None:
            with contextlib.suppress(OSError):
                found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def since(before: dict[str, float]) -> dict[str, float]:
    """What threads have had since then, those that had something."""
    return {
        name: t - before.get(name, 0.0) for name, t in on_processor().items() if t > before.get(name, 0.0)
    }


def served(
    made: Any, watched: Watched, name: str, tokens: list[int], params: dict[str, Any], *, busy: bool
) -> Seen:
    """One request whose KV is loaded; in a ``busy`` engine beside one that decodes."""
    seen = Seen()
    time.sleep(SETTLE)
    if busy:
        decode_beside(made, name, tokens)
    arrived, left = time.perf_counter(), made.left
    made.arrive(name, tokens, params, ANSWERED)
    began, token, own, before = 0.0, 0.0, 0.0, on_processor()
    while not token:
        waited = made.waits(name)
        kept = on_processor() if waited else before
        mine = time.thread_time()
        watched.seen.clear()
        answers = made.step()
        if not began and not made.waits(name):
            began, before, own = watched.began, kept, mine
        kind = "first" if began else "waits" if waited else "begins"
        for part, values in watched.seen.items():
            seen.parts[f"{kind}: {part}"] += values
        if said(answers, name):
            token = time.perf_counter()
    if "instant" not in params:
        (theirs,) = params["remote_block_ids"]
        seen.wrong = made.wrong_blocks(name, theirs)
    seen.left = made.left - left
    seen.whole = token - arrived
    seen.window, seen.own, seen.others = token - began, time.thread_time() - own, since(before)
    count, last = 1, token
    while count < ANSWERED:
        watched.seen.clear()
        count += said(made.step(), name)
        now = time.perf_counter()
        seen.steps.append(now - last)
        last = now
        for part, values in watched.seen.items():
            seen.parts[f"decodes: {part}"] += values
    run_out(made)
    time.sleep(AFTER)
    seen.later = {n: t - seen.others.get(n, 0.0) for n, t in since(before).items()}
    return seen


def decode_beside(made: Any, name: str, tokens: list[int]) -> None:
    """Have another request decode from now on."""
    made.arrive(f"beside {name}", tokens[1 : BLOCK + 1], None, BESIDE)
    for _ in range(4):
        made.step()


def run_out(made: Any) -> None:
    """Step until nothing is left, not even of the steps themselves."""
    while made.scheduler.has_requests():
        made.step()
    for _ in range(3):
        made.step()


def said(answers: list[Any], name: str) -> int:
    """Tokens of one request."""
    return sum(len(answer.new_token_ids) for answer in answers if answer.request_id == name)


def measure(options: argparse.Namespace, folder: Path) -> dict[tuple[str, int], list[Seen]]:
    """All ways in turns, for each length."""
    import torch

    from benchmarks.stepped_engine import one_process

    torch.set_num_threads(1)
    write_model("llama", folder / "models")
    kvd = launch("host", folder / "kvd", "127.0.0.1:0", {})
    kvd.wait_ready()
    spawn = multiprocessing.get_context("spawn")
    found: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        stack.callback(kvd.stop)
        stack.enter_context(one_process(folder))
        ask: dict[str, Callable[[list[int]], dict[str, Any]]] = {"instant": lambda _: {"instant": True}}
        for way in [way for way in options.ways if way != "instant"]:
            ask[way] = _started(spawn, options, way, folder, stack)
        engines = {}
        for way in options.ways:
            watched = Watched()
            config = configured(way, f"d-{way}", "kv_consumer", folder, options.backend)
            engines[way] = engine(options, config, folder, around=watched.around), watched
            stack.callback(engines[way][0].close)
        for number in range(options.rounds + 2):
            for tokens in options.tokens:
                for way in options.ways:
                    prompt = [random.randrange(10, 500) for _ in range(tokens)]  # noqa: S311 - not for secrets
                    params = ask[way](prompt)
                    seen = served(*engines[way], f"r{number}-{tokens}", prompt, params, busy=options.busy)
                    if number > 1:
                        found[way, tokens].append(seen)
    return found


def _started(
    spawn: Any, options: argparse.Namespace, way: str, folder: Path, stack: contextlib.ExitStack
) -> Callable[[list[int]], dict[str, Any]]:
    here, there = spawn.Pipe()
    process = spawn.Process(target=prefiller, args=(options, way, folder, there), daemon=True)
    process.start()
    stack.callback(process.join, 20.0)
    stack.callback(here.send, None)
    if here.recv() != "ready":
        raise SystemExit(f"the prefiller of {way} did not start")

    def ask(tokens: list[int]) -> dict[str, Any]:
        here.send(tokens)
        return dict(here.recv())

    return ask


def main() -> None:
    """Measure and print."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--tokens", type=_numbers, default=[512, 4096], help="lengths of prompts, with commas"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--launches", type=int, default=300, help="operations of a step that computes")
    parser.add_argument("--backend", default="direct")
    parser.add_argument("--busy", action="store_true", help="another request decodes meanwhile")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["kvd", "instant"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        found = measure(options, Path(folder))
    for (way, tokens), all_seen in found.items():
        medians = summed(all_seen)
        if options.json:
            sys.stdout.write(json.dumps({"way": way, "tokens": tokens, **medians}) + "\n")
            continue
        sys.stdout.write(f"{way}, {tokens} tokens\n")
        for name, value in medians.items():
            sys.stdout.write(f"  {name:40} {value:8.1f}\n")


def summed(all_seen: list[Seen]) -> dict[str, float]:
    """Medians over requests, in microseconds."""

    def middle(values: list[float]) -> float:
        return round(1e6 * median(values), 1)

    found = {
        "wrong blocks": float(sum(seen.wrong for seen in all_seen)),
        "loads left to their step": float(sum(seen.left for seen in all_seen)),
        "to the first token": middle([seen.whole for seen in all_seen]),
        "first token: window": middle([seen.window for seen in all_seen]),
        "first token: this thread": middle([seen.own for seen in all_seen]),
        "first token: other threads": middle([sum(seen.others.values()) for seen in all_seen]),
        "later: other threads": middle([sum(seen.later.values()) for seen in all_seen]),
        "decode step": middle([step for seen in all_seen for step in seen.steps]),
    }
    for name in sorted({name for seen in all_seen for name in (*seen.others, *seen.later)}):
        if not name.startswith("Main"):
            found[f"  {name}"] = middle([seen.others.get(name, 0.0) for seen in all_seen])
            found[f"  {name}, later"] = middle([seen.later.get(name, 0.0) for seen in all_seen])
    for name in sorted({name for seen in all_seen for name in seen.parts}):
        values = [value for seen in all_seen for value in seen.parts.get(name, ())]
        if values:
            found[name] = middle(values)
    return found


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    main()
