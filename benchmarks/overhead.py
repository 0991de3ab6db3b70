"""What a connector costs an engine's steps, as ratios to no connector, all engines taking turns in one run.

    python benchmarks/overhead.py [--rounds 20] [--tokens 150] [--prompt 1536] [--layers 32 --width 512] [--json]

Engines with a tiny model: one without a connector, one with vLLM's plumbing and a connector that does nothing, and a
prefiller with KvdConnector in mode push beside a decoder. One is at work at a time. Decoding steps show what an idle
connector costs; prefills that are pushed to the decoder against ones that are not show what pushing costs.

Seconds are the client's, a ratio is the median of those within a round, since the machine may be shared. Time on the
processor is that of the process that schedules and computes, from the kernel's books: waiting for a busy machine does
not count there, but what others leave in the caches does. What the connector's own methods take of it is counted in
them (benchmarks/timed_connector.py), which is the figure that a busy machine changes least. A tiny model has short
steps, so what is added to each weighs more than on a real one; ``--layers`` and ``--width`` make them as long as those.
While a prompt is pushed the decoder works as well; on few cores that slows the prefill by itself. At rest nothing is
asked of any engine: what its threads take of one core.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import struct
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median

from kvctl.demo.deployment import Deployment, engine_id, engines, transfer_config
from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import Kvd, two_hosts
from tests.support.engine_pids import engine_pids
from tests.support.tiny_models import MODELS, write_model

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, ANSWER_SECONDS = 600.0, 300.0
PATIENT = {"handshake_timeout": 60.0, "push_timeout": 120.0}
NOTHING = {
    "kv_connector": "NothingConnector",
    "kv_connector_module_path": "benchmarks.nothing_connector",
    "kv_role": "kv_both",
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """An engine, and the file in which its connector counts where it does."""

    engine: EngineProcess
    counts: Path | None = None


@dataclasses.dataclass(frozen=True)
class Taken:
    """One piece of work: the client's seconds, the engine's on the processor, those in the connector, steps."""

    wall: float
    cpu: float
    own: float
    steps: int


def on_processor(engine: EngineProcess) -> float:
    """Seconds on a processor of the process that schedules and computes, of all its threads, also of ended ones."""
    return time.clock_gettime(~engine_pids(engine).core << 3 | 2)  # how Linux numbers the clock of a process


def counted(measured: Measured) -> tuple[float, int]:
    """Seconds in the connector so far, and steps."""
    if measured.counts is None:
        return 0.0, 0
    nanoseconds, steps = struct.unpack("qq", measured.counts.read_bytes())
    return nanoseconds / 1e9, steps


def taken(measured: Measured, work: Callable[[], float]) -> Taken:
    """Do ``work``, which gives the client's seconds."""
    before, own, steps = on_processor(measured.engine), *counted(measured)
    wall = work()
    cpu, (own_now, steps_now) = on_processor(measured.engine) - before, counted(measured)
    return Taken(wall, cpu, own_now - own, steps_now - steps)


def at_rest(engines: dict[str, Measured], seconds: float) -> list[dict[str, float | str]]:
    """What share of a core each engine takes while it is asked for nothing."""
    before = {name: on_processor(measured.engine) for name, measured in engines.items()}
    time.sleep(seconds)
    return [
        {"work": name, "cores": (on_processor(measured.engine) - before[name]) / seconds}
        for name, measured in engines.items()
    ]


def answered(answer: EngineAnswer) -> EngineAnswer:
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


def rounds(works: dict[str, tuple[Measured, Callable[[], float]]], count: int) -> dict[str, list[Taken]]:
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
                "own_per_step_s": median(one.own / max(1, one.steps) for one in values),
                "wall_ratio": median(one.wall / other.wall for one, other in pairs),
                "cpu_ratio": median(one.cpu / other.cpu for one, other in pairs),
            }
        )
    return lines


def with_connector(spec: EngineSpec, host: Kvd, role: str, backend: str) -> EngineSpec:
    """The spec with KvdConnector in mode push."""
    config = transfer_config(
        host, engine_id(host), role, extra={"mode": "push", "backend": backend, **PATIENT}
    )
    return dataclasses.replace(spec, kv_transfer_config=config)


def timed(spec: EngineSpec, counts: Path) -> EngineSpec:
    """The spec with a connector that counts its own time in a file."""
    config = {**(spec.kv_transfer_config or {}), "kv_connector": "TimedConnector"}
    config["kv_connector_module_path"] = "benchmarks.timed_connector"
    env = {**spec.env, "KVD_TIMED": str(counts)}
    return dataclasses.replace(spec, kv_transfer_config=config, env=env)


def sized(layers: int, width: int) -> str:
    """The name of the tiny Llama with so many layers, so wide; each 0 for what it has."""
    tiny = MODELS["llama"]
    config = dict(tiny.config)
    if layers:
        config["num_hidden_layers"] = layers
    if width:
        config |= {"hidden_size": width, "intermediate_size": 2 * width}
    name = f"llama-{layers}-{width}"
    MODELS.setdefault(name, dataclasses.replace(tiny, name=name, config=config))
    return name


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, float | str]]]:
    """Start everything and let it take turns."""
    model = write_model(sized(options.layers, options.width), folder / "models")

    def spec(name: str) -> EngineSpec:
        return EngineSpec(
            model=model,
            work_dir=folder / name,
            log_path=folder / f"{name}.log",
            max_model_len=4096,
            kv_cache_memory_bytes=max(64, 8 * options.layers) << 20,
            max_num_batched_tokens=options.chunk,
            enable_prefix_caching=False,
            cache_dir=folder / "cache",
            env={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )

    with two_hosts(folder) as hosts, engines() as start:
        none = start(spec("none"))
        none.wait_ready(START_SECONDS)  # it finds out about the model for all
        nothing = start(dataclasses.replace(spec("nothing"), kv_transfer_config=NOTHING))
        counts = folder / "counts"
        counts.write_bytes(bytes(16))
        pair = Deployment(
            *hosts,
            start(timed(with_connector(spec("prefill"), hosts[0], "kv_producer", options.backend), counts)),
            start(with_connector(spec("decode"), hosts[1], "kv_consumer", options.backend)),
            "push",
        )
        for engine in (nothing, pair.prefill, pair.decode):
            engine.wait_ready(START_SECONDS)
        bare, prefiller = Measured(none), Measured(pair.prefill, counts)
        decodes = {
            "no connector": bare,
            "a connector that does nothing": Measured(nothing),
            "KvdConnector, idle": prefiller,
        }
        found = {
            "decode": ratios(
                rounds(
                    {n: (m, lambda e=m.engine: decode(e, options.tokens)) for n, m in decodes.items()}, options.rounds
                ),
                "no connector", options.tokens,
            )
        }  # fmt: skip
        found["rest"] = at_rest(decodes, options.rest)
        if not options.idle:
            prefills = {
                "no connector": (bare, lambda: prefill(none, options.prompt)),
                "KvdConnector, idle": (prefiller, lambda: prefill(pair.prefill, options.prompt)),
                "KvdConnector, pushing": (prefiller, lambda: push(pair, options.prompt)),
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
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: few")
    parser.add_argument("--width", type=int, default=0, help="of the model; 0: tiny")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds of rest")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--idle", action="store_true", help="only decoding steps, nothing is pushed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for line in found.pop("rest"):
        sys.stdout.write(f"at rest: {line['work']:30} {line['cores']:.4f} cores\n")
    for what, lines in found.items():
        sys.stdout.write(f"{what} steps\n")
        for line in lines:
            sys.stdout.write(
                f"  {line['work']:30} wall {1e6 * float(line['wall_per_step_s']):7.0f} us, ratio"
                f" {line['wall_ratio']:.3f}; processor {1e6 * float(line['cpu_per_step_s']):7.0f} us, ratio"
                f" {line['cpu_ratio']:.3f}; in the connector {1e6 * float(line['own_per_step_s']):.1f} us\n"
            )


if __name__ == "__main__":
    main()
