"""How soon an engine answers who asks for a prefix of its cache, idle and busy, and what waiting for that costs it.

    python -m benchmarks.prefix_answers [--blocks 14] [--questions 300]

A real vLLM engine on CPUs, its kvd, and this process in the place of another host's kvd. Times are from the question
until the answer, on loopback.
"""

# ruff: noqa: INP001, S101, T201 - a script in a folder of scripts

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from kvctl.demo.deployment import engines, transfer_config
from kvctl.demo.engine import EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import two_hosts
from kvd.client.remote import RemoteKvd, RemoteOperator
from kvd.wire.prefix import CheckPrefix, FindPrefix, PrefixFound, PrefixKept
from kvd.wire.query import EngineList, ListEngines
from tests.support.deployments import prompt_of
from tests.support.tiny_models import write_model

BLOCK = 128


def main() -> None:
    """Run all of it and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--blocks", type=int, default=14)
    options.add_argument("--questions", type=int, default=300)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name, two_hosts(Path(name)) as hosts, engines() as start:
        folder, host = Path(name), hosts[0]
        spec = EngineSpec(
            model=write_model("llama", folder / "models"),
            work_dir=folder / "engine",
            log_path=folder / "engine.log",
            max_model_len=8192,
            kv_transfer_config=transfer_config(host, "held", "kv_both", extra={"prefixes": "on"}),
        )
        engine = start(spec)
        engine.wait_ready(300.0)
        prompt = prompt_of(chosen.blocks * BLOCK + 1)
        engine.submit(prompt, 1).result(120)
        rows = host.ask(ListEngines())
        assert isinstance(rows, EngineList)
        row = next(one for one in rows.rows if one.local)
        question = FindPrefix(
            local_engine="asker",
            reader="reader",
            scheme=str(row.engine.facts["prefix_hashes"]),
            hash_tokens=BLOCK,
            hashes=b"".join(hashes(prompt, chosen.blocks)),
            most=len(prompt) - 1,
        )
        check = CheckPrefix(engine_id="held", generation=row.generation, reader="reader")
        there = host.endpoint()
        with RemoteOperator(RemoteKvd(there.host, there.port), 10.0) as asker:
            time.sleep(1.0)
            before, began = cpu_seconds(engine), time.monotonic()
            time.sleep(5.0)
            idle_cpu = (cpu_seconds(engine) - before) / (time.monotonic() - began)
            idle = ask(asker, question, check, chosen.questions)
            running = [engine.submit(prompt_of(64, seed=i), 4000) for i in range(8)]
            time.sleep(1.0)
            decoding = ask(asker, question, check, chosen.questions)
            more = [engine.submit(prompt_of(4000, seed=100 + i), 1) for i in range(8)]
            prefilling = ask(asker, question, check, chosen.questions // 3)
            assert not all(one.done() for one in more)
            assert not any(one.done() for one in running)
    print(f"idle engine, nobody asks: {idle_cpu:.3f} of a core")
    print("| engine | question | median ms | p99 ms | worst ms |\n|---|---|---|---|---|")
    for what, (found, checked) in (
        ("idle", idle),
        ("8 decodes", decoding),
        ("prefill beside them", prefilling),
    ):
        for asked, times in (("find", found), ("check", checked)):
            times.sort()
            p99 = times[int(len(times) * 0.99)]
            print(f"| {what} | {asked} | {statistics.median(times):.2f} | {p99:.2f} | {times[-1]:.2f} |")


def ask(
    asker: RemoteOperator, question: FindPrefix, check: CheckPrefix, count: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of so many of both questions; each has to be answered with yes."""
    found, checked = [], []
    for _ in range(count):
        time.sleep(0.02)
        began = time.perf_counter()
        answer = asker.ask(question)
        found.append((time.perf_counter() - began) * 1e3)
        assert isinstance(answer, PrefixFound)
        assert answer.tokens == question.most, answer
        began = time.perf_counter()
        kept = asker.ask(check)
        checked.append((time.perf_counter() - began) * 1e3)
        assert isinstance(kept, PrefixKept)
        assert kept.kept, kept.reason
    return found, checked


def hashes(prompt: list[int], blocks: int) -> list[bytes]:
    """The hashes of a prompt's blocks, as an engine with vLLM's defaults makes them."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    sha256 = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(sha256)
    made: list[bytes] = []
    for at in range(blocks):
        parent = made[-1] if made else None
        tokens = prompt[at * BLOCK : (at + 1) * BLOCK]
        made.append(kv_cache_utils.hash_block_tokens(sha256, parent, tokens))
    return made


def cpu_seconds(engine: EngineProcess) -> float:
    """Processor time of all processes of an engine so far."""
    import psutil

    process = psutil.Process(engine._process.pid)  # noqa: SLF001 - nobody else needs it
    every = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in every)


if __name__ == "__main__":
    main()
