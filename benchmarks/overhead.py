"""What a connector costs an engine's steps, as ratios to no connector, all engines taking turns in one run.

    python benchmarks/overhead.py [--rounds 20] [--tokens 150] [--prompt 1536] [--backend nixl] [--json]

Engines with a tiny model: one without a connector, one with vLLM's plumbing and a connector that does nothing, and a
prefiller with KvdConnector in mode push beside a decoder. One is at work at a time. Decoding steps show what an idle
connector costs; prefills that are pushed to the decoder against ones that are not show what pushing costs.

Seconds are the client's, a ratio is the median of those within a round, since the machine may be shared. Time on the
processor is that of the engine's process, all threads, from the kernel's books: waiting for a busy machine does not
count there. A tiny model has short steps, so what is added to each weighs more than on a real one: microseconds are
given too. While a prompt is pushed the decoder works as well; on few cores that slows the prefill by itself.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median

from kvctl.demo.deployment import Deployment, engines, launch, two_hosts
from kvctl.demo.engine import Answer, EngineProcess, EngineSpec
from kvctl.demo.models import write_model

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, ANSWER_SECONDS = 600.0, 300.0
PATIENT = {"handshake_timeout": 60.0, "push_timeout": 120.0}
NOTHING = {
    "kv_connector": "NothingConnector",
    "kv_connector_module_path": "benchmarks.nothing_connector",
    "kv_role": "kv_both",
}


@dataclasses.dataclass(frozen=True)
class Taken:
    """What one piece of work took: the client's seconds, and the engine's on the processor."""

    wall: float
    cpu: float


def on_processor(engine: EngineProcess) -> float:
    """Seconds that all threads of the process that schedules and computes have spent on a processor so far.

    vLLM computes on a thread of its own or on the scheduler's, as it finds the connector; and ours has threads too.
    """
    tasks = Path(f"/proc/{engine.pids().core}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def taken(engine: EngineProcess, work: Callable[[], float]) -> Taken:
    """Do ``work``, which gives the client's seconds."""
    before = on_processor(engine)
    wall = work()
    return Taken(wall, on_processor(engine) - before)


def answered(answer: Answer) -> Answer:
    """The answer if it is one."""
    if answer.error:
        raise SystemExit(f"a request failed: {answer.error}")
    return answer


def decode(engine: EngineProcess, tokens: int) -> float:
    """Decode so many tokens; seconds after the first one."""
    answer = answered(engine.submit(prompt_of(32), tokens + 1).result(ANSWER_SECONDS))
    return answer.total_seconds - (answer.first_token_seconds or 0.0)


def prefill(engine: EngineProcess, tokens: int) -> float:
    """Prefill a prompt for nobody; seconds."""
    return answered(engine.submit(prompt_of(tokens), 1).result(ANSWER_SECONDS)).total_seconds


def push(deployment: Deployment, tokens: int) -> float:
    """Prefill a prompt and push it to the decoder; seconds of the prefill."""
    prompt = prompt_of(tokens)
    there, here = deployment.push_params(uuid.uuid4().hex)
    decoding = deployment.decode.submit(prompt, 1, here)
    seconds = answered(deployment.prefill.submit(prompt, 1, there).result(ANSWER_SECONDS)).total_seconds
    answered(decoding.result(ANSWER_SECONDS))
    return seconds


def prompt_of(tokens: int) -> list[int]:
    """A prompt that was never there before."""
    return [random.randrange(10, 500) for _ in range(tokens)]  # noqa: S311 - not for secrets


def rounds(works: dict[str, tuple[EngineProcess, Callable[[], float]]], count: int) -> dict[str, list[Taken]]:
    """All works in turn, each round beginning with another one; the first round is not counted."""
    names = list(works)
    found: dict[str, list[Taken]] = {name: [] for name in names}
    for number in range(count + 1):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            one = taken(*works[name])
            if number:
                found[name].append(one)
    return found


def ratios(found: dict[str, list[Taken]], base: str, steps: int) -> list[dict[str, float | str]]:
    """For each work: seconds a step, and ratios to ``base``."""
    lines: list[dict[str, float | str]] = []
    for name, values in found.items():
        pairs = list(zip(values, found[base], strict=True))
        lines.append(
            {
                "work": name,
                "wall_per_step_s": median(one.wall for one in values) / steps,
                "cpu_per_step_s": median(one.cpu for one in values) / steps,
                "wall_ratio": median(one.wall / other.wall for one, other in pairs),
                "cpu_ratio": median(one.cpu / other.cpu for one, other in pairs),
            }
        )
    return lines


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float | str]]]:
    """Start everything and let it take turns."""
    model = write_model("llama", folder / "models")

    def spec(name: str) -> EngineSpec:
        return EngineSpec(
            model=model,
            work_dir=folder / name,
            log_path=folder / f"{name}.log",
            max_model_len=4096,
            max_num_batched_tokens=options.chunk,
            enable_prefix_caching=False,
            cache_dir=folder / "cache",
            env={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )

    with two_hosts(folder) as hosts, engines() as start:
        none = start(spec("none"))
        none.wait_ready(START_SECONDS)  # it finds out about the model for all
        nothing = start(dataclasses.replace(spec("nothing"), kv_transfer_config=NOTHING))
        pair = launch(
            start, hosts, spec("prefill"), spec("decode"), mode="push",
            extra={"backend": options.backend, **PATIENT},
        )  # fmt: skip
        for engine in (nothing, pair.prefill, pair.decode):
            engine.wait_ready(START_SECONDS)
        decodes = {
            "no connector": none,
            "a connector that does nothing": nothing,
            "KvdConnector, idle": pair.prefill,
        }
        found = {
            "decode": ratios(
                rounds({n: (e, lambda e=e: decode(e, options.tokens)) for n, e in decodes.items()}, options.rounds),
                "no connector", options.tokens,
            )
        }  # fmt: skip
        if not options.idle:
            prefills = {
                "no connector": (none, lambda: prefill(none, options.prompt)),
                "KvdConnector, idle": (pair.prefill, lambda: prefill(pair.prefill, options.prompt)),
                "KvdConnector, pushing": (pair.prefill, lambda: push(pair, options.prompt)),
            }
            steps = -(-options.prompt // options.chunk)
            found["prefill"] = ratios(rounds(prefills, options.rounds), "no connector", steps)
        return found


def main() -> None:
    """Measure and print."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=150, help="decoded in a round")
    parser.add_argument("--prompt", type=int, default=1536, help="tokens of a prompt that is prefilled")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill step")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--idle", action="store_true", help="only decoding steps, nothing is pushed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for what, lines in found.items():
        sys.stdout.write(f"{what} steps\n")
        for line in lines:
            sys.stdout.write(
                f"  {line['work']:30} wall {1e6 * float(line['wall_per_step_s']):7.0f} us, ratio"
                f" {line['wall_ratio']:.3f}; processor {1e6 * float(line['cpu_per_step_s']):7.0f} us, ratio"
                f" {line['cpu_ratio']:.3f}\n"
            )


if __name__ == "__main__":
    main()
