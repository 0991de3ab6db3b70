"""How much of a prompt's KV leaves while it is computed, and how soon after that the decoder may start: push and pull.

    python benchmarks/layerwise.py [--layers 32] [--prompt 4096] [--chunk 512] [--rounds 8] [--backend nixl] [--json]

Two engines with a model of many layers and tiny width; each round takes a new prompt through both, once pushed and once
pulled, one after the other. The connector in both engines notes when transfers were done, when each step's layers were
computed, and when the load was reported to vLLM (`measured_connector.py`); all clocks are one host's. A transfer counts
as gone when its sender (or, where the decoder reads, its reader) saw that it was done, which is a little late.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.cli.units import Mode
from kvctl.demo.deployment import Deployment, engine_id, engines, transfer_config
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import two_hosts
from tests.support.tiny_models import MODELS, write_model

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, ANSWER_SECONDS = 600.0, 300.0
PATIENT = {"handshake_timeout": 60.0, "push_timeout": 120.0, "load_timeout": 60.0, "lease_seconds": 120.0}
NEW_TOKENS = 4
MIB = 1 << 20


@contextmanager
def running(options: argparse.Namespace, folder: Path) -> Iterator[Deployment]:
    """Two engines with the connector that measures. In mode push they also serve pulls."""
    name = f"llama-{options.layers}"
    tiny = MODELS["llama"]
    config = tiny.config | {"num_hidden_layers": options.layers}
    MODELS[name] = dataclasses.replace(tiny, name=name, config=config)
    model = write_model(name, folder / "models")
    page = 2 * config["num_key_value_heads"] * config["head_dim"] * 4 * options.layers
    with two_hosts(folder) as hosts, engines() as start:
        begun = []
        for host, role in zip(hosts, ("kv_producer", "kv_consumer"), strict=True):
            connector = transfer_config(
                host,
                engine_id(host),
                role,
                extra={"mode": "push", "backend": options.backend, **PATIENT},
            )
            connector |= {
                "kv_connector": "MeasuredConnector",
                "kv_connector_module_path": "benchmarks.measured_connector",
            }
            begun.append(
                start(
                    EngineSpec(
                        model=model,
                        work_dir=folder / host.name,
                        log_path=folder / f"{host.name}.log",
                        max_model_len=options.prompt + 256,
                        max_num_batched_tokens=options.chunk,
                        kv_cache_memory_bytes=max(64 * MIB, 3 * page * options.prompt),
                        enable_prefix_caching=False,
                        cache_dir=folder / "cache",
                        kv_transfer_config=connector,
                        env={
                            "KVD_MEASURED": str(folder / f"{host.name}.jsonl"),
                            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                        },
                    )
                )
            )
        for engine in begun:
            engine.wait_ready(START_SECONDS)
        yield Deployment(*hosts, begun[0], begun[1])


def once(deployment: Deployment, mode: Mode, prompt: list[int], folder: Path) -> dict[str, float]:
    """One request; what was noted of it."""
    began = time.monotonic()
    asked = dataclasses.replace(deployment, mode=mode).ask(prompt, NEW_TOKENS, ANSWER_SECONDS)
    for answer in (asked.prefilled, asked.decoded):
        if answer.error:
            raise SystemExit(f"{mode}: a request failed: {answer.error}")
    prefiller, decoder = (
        [n for n in notes(folder, host) if n["at"] > began] for host in ("prefill", "decode")
    )
    moved = [(n["at"], n["bytes"]) for n in (*prefiller, *decoder) if n["what"] == "moved"]
    received = next((n["at"] for n in decoder if n["what"] == "received" and not n["failed"]), None)
    if received is None:
        raise SystemExit(f"{mode}: the decoder loaded nothing")
    computed = [n["last"] for n in prefiller if n["what"] == "computed"]
    end = max(computed)
    total = sum(size for _, size in moved)
    return {
        "bytes": total,
        "prefill_seconds": end - began,
        "part_before_end": sum(size for at, size in moved if at <= end) / total,
        "end_to_start_seconds": received - end,
        "first_token_seconds": asked.decoded.first_token_seconds or 0.0,
    }


def notes(folder: Path, host: str) -> list[dict[str, Any]]:
    """What an engine's connector wrote down so far."""
    return [json.loads(line) for line in (folder / f"{host}.jsonl").read_text().splitlines()]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rounds of both modes in turn; the first of each, which shakes hands, is not counted."""
    found: dict[Mode, list[dict[str, float]]] = {"push": [], "pull": []}
    with running(options, folder) as deployment:
        for number in range(options.rounds + 1):
            for mode in ("push", "pull") if number % 2 else ("pull", "push"):
                prompt = [random.randrange(10, 500) for _ in range(options.prompt)]  # noqa: S311 - not for secrets
                one = once(deployment, mode, prompt, folder)
                if number:
                    found[mode].append(one)  # type: ignore[index]
    middle = {
        mode: {name: median(one[name] for one in values) for name in values[0]}
        for mode, values in found.items()
    }
    pairs = zip(found["push"], found["pull"], strict=True)
    return {
        "backend": options.backend,
        "layers": options.layers,
        "prompt": options.prompt,
        "chunk": options.chunk,
        "rounds": options.rounds,
        **middle,
        "parts_before_end": [one["part_before_end"] for one in found["push"]],
        "push_over_pull": median(a["end_to_start_seconds"] / b["end_to_start_seconds"] for a, b in pairs),
    }


def main() -> None:
    """Measure and print."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="layerwise-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    sys.stdout.write(
        f"{found['layers']} layers, {found['prompt']} tokens in chunks of {found['chunk']}, {found['backend']},"
        f" {found['rounds']} rounds\n"
    )
    for mode in ("push", "pull"):
        line = found[mode]
        sys.stdout.write(
            f"  {mode}: {line['bytes'] / MIB:.1f} MiB, {100 * line['part_before_end']:.1f} % before the prefill's end;"
            f" prefill {line['prefill_seconds']:.2f} s, from its end to the decoder's start"
            f" {1e3 * line['end_to_start_seconds']:.1f} ms, first token after {line['first_token_seconds']:.2f} s\n"
        )
    sys.stdout.write(
        f"  before the end in each round: {', '.join(f'{100 * part:.1f} %' for part in found['parts_before_end'])};"
        f" end to start, push over pull: {found['push_over_pull']:.2f}\n"
    )


if __name__ == "__main__":
    main()
