"""From a fault to the first token that is computed after it: KvdConnector beside the stock NixlConnector.

    python benchmarks/recovery.py [--model llama] [--faults refused,silent,lease,stopped,killed] [--wait 60] [--json]

A prefilling and a decoding engine on this host, first with one connector, then with the other: the same vLLM, model,
prompts and NIXL over TCP, policy recompute, the connectors' own default times. A request is prefilled, meets the fault
and goes to the decoder:

refused   at the address of its prefiller nobody listens
silent    at that address connections are taken and nothing is ever said
lease     its lease is over and the prefiller has computed other prompts in its blocks
stopped   the prefiller stands still (SIGSTOP) before the decoder reads
killed    the prefiller is killed (SIGKILL) while the decoder reads

Seconds count from the request's arrival at the decoder, for `killed` from the kill. What the decoder takes for the
same prompt without a fault is taken off: what is left is the time until the failure was reported. An answer is held
against what the decoder answers alone. After ``--wait`` seconds without an answer the fault is over.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.demo.deployment import PREFILL_PARAMS, engine_id, engines, transfer_config
from kvctl.demo.engine import EngineAnswer, EngineProcess
from kvctl.demo.engine_spec import EngineSpec
from kvctl.processes.daemons import two_hosts
from tests.support.engine_calls import reset_prefix_cache
from tests.support.engine_pids import engine_pids
from tests.support.halting import halt, halted
from tests.support.tiny_models import MODELS, NO_PREFIX_CACHING, ONE_AT_A_TIME, write_model

START_SECONDS, ANSWER_SECONDS = 400.0, 120.0
PROMPT, ANSWER = 400, 8
CACHE_BYTES = 16 << 20
"""So little that a few other prompts take all blocks of the prefiller."""
OTHERS = 12
LEASE = 30.0
"""Both connectors' default."""
LEASE_OVER = LEASE + 8.0
UNDER_WAY = 1.0
"""Seconds after which a request is being read: the decoder is idle and knows the prefiller."""


@dataclass(frozen=True)
class Pair:
    """Two engines; ``dice`` makes prompts."""

    prefill: EngineProcess
    decode: EngineProcess
    dice: random.Random
    wait: float

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        return [self.dice.randrange(10, 500) for _ in range(PROMPT)]

    def prefilled(self, prompt: Sequence[int]) -> Mapping[str, Any]:
        """What the decoder gets told of a prompt that was prefilled."""
        params = self.prefill.submit(prompt, 1, PREFILL_PARAMS).result(ANSWER_SECONDS).kv_transfer_params
        if params is None:
            raise SystemExit("the prefiller handed nothing on")
        return {name: value for name, value in params.items() if name != "remote_prefill_cached_tokens"}

    @property
    def prefilling(self) -> tuple[int, ...]:
        """The prefiller's scheduler and worker."""
        return tuple(engine_pids(self.prefill).executing)


@dataclass(frozen=True)
class Met:
    """A request under way and the time.monotonic() from which on its time counts."""

    decoding: Future[EngineAnswer]
    submitted: float
    fault: float


@dataclass(frozen=True)
class Found:
    """What became of a request: seconds to its report and its first token, None where none came, and the answer."""

    report: float | None
    first_token: float | None
    answer: str


def refused(pair: Pair, prompt: Sequence[int]) -> Met:
    """Nobody listens where the prefiller should be."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    return begun(pair, prompt, elsewhere(pair.prefilled(prompt), port))


@contextmanager
def silent(pair: Pair, prompt: Sequence[int]) -> Iterator[Met]:
    """Somebody listens there who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        yield begun(pair, prompt, elsewhere(pair.prefilled(prompt), place.getsockname()[1]))


def lease(pair: Pair, prompt: Sequence[int]) -> Met:
    """The prefiller has let go of the blocks, and uses them."""
    params = pair.prefilled(prompt)
    time.sleep(LEASE_OVER)
    for _ in range(OTHERS):
        pair.prefill.submit(pair.prompt(), 1).result(ANSWER_SECONDS)
    return begun(pair, prompt, params)


@contextmanager
def stopped(pair: Pair, prompt: Sequence[int]) -> Iterator[Met]:
    """The prefiller stands still until the request is over, or was waited for."""
    params = pair.prefilled(prompt)
    with halted(pair.prefilling):
        yield begun(pair, prompt, params)


def killed(pair: Pair, prompt: Sequence[int]) -> Met:
    """The prefiller dies while it is read from: it stands still before, so that nothing is over too early."""
    params = pair.prefilled(prompt)
    pids = pair.prefilling
    halt(*pids)
    met = begun(pair, prompt, params)
    time.sleep(UNDER_WAY)
    if met.decoding.done():
        raise SystemExit("the request was over before its prefiller could be killed")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return replace(met, fault=time.monotonic())


FAULTS: dict[str, Callable[[Pair, Sequence[int]], Any]] = {
    "refused": refused,
    "silent": silent,
    "lease": lease,
    "stopped": stopped,
    "killed": killed,
}
"""In the order in which engines meet them: the last one ends the prefiller."""


def begun(pair: Pair, prompt: Sequence[int], params: Mapping[str, Any]) -> Met:
    """The request at the decoder."""
    now = time.monotonic()
    return Met(pair.decode.submit(prompt, ANSWER, params), now, now)


def elsewhere(params: Mapping[str, Any], port: int) -> dict[str, Any]:
    """The same blocks of an engine that nobody knows, at a port of this host."""
    return {**params, "remote_engine_id": uuid.uuid4().hex, "remote_host": "127.0.0.1", "remote_port": port}


def main() -> None:
    """Run it and print what came of it."""
    options = _options()
    found: dict[str, dict[str, Found]] = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        for name, start in (("kvd", kvd_pair), ("stock", stock_pair)):
            if name in options.connectors:
                _say(f"{name}: starting engines")
                with start(Path(folder), options) as pair:
                    found[name] = met_all(pair, options.faults)
    if options.json:
        lines = {way: {fault: vars(one) for fault, one in faults.items()} for way, faults in found.items()}
        told = {"model": options.model, "wait": options.wait, "load": os.getloadavg()[0], **lines}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        sys.stdout.writelines(line + "\n" for line in table(found, options.wait))


def met_all(pair: Pair, faults: Sequence[str]) -> dict[str, Found]:
    """The faults one after the other, each with a prompt of its own."""
    first = pair.prompt()  # the pair gets to know each other
    pair.decode.submit(first, ANSWER, pair.prefilled(first)).result(ANSWER_SECONDS)
    prompts = [pair.prompt() for _ in faults]
    expected = [references(pair, prompt) for prompt in prompts]
    alone = median(seconds for _, seconds in expected)
    found = {}
    for fault, prompt, (answers, _) in zip(faults, prompts, expected, strict=True):
        made = FAULTS[fault](pair, prompt)
        if isinstance(made, Met):
            answer = awaited(made.decoding, pair.wait)
            met = made
        else:
            with made as met:
                answer = awaited(met.decoding, pair.wait)
        found[fault] = judged(answer, met, answers, alone)
        _say(f"{fault}: {found[fault]}")
        if answer is None and fault != "killed":
            awaited(met.decoding, ANSWER_SECONDS)
    return found


def references(pair: Pair, prompt: Sequence[int]) -> tuple[dict[str, tuple[int, ...]], float]:
    """What the decoder answers alone: in one piece, and in those of a hand-over; and its time to the first token."""
    whole = pair.decode.submit(prompt, ANSWER).result(ANSWER_SECONDS)
    _forget(pair.decode)
    pieces = pair.decode.submit_alone(prompt, ANSWER).result(ANSWER_SECONDS)
    _forget(pair.decode)
    answers = {"recomputed": whole.token_ids, "reused": pieces.token_ids[1:]}
    return answers, whole.first_token_seconds or 0.0


def awaited(decoding: Future[EngineAnswer], seconds: float) -> EngineAnswer | None:
    """The answer, or None where none came in time."""
    try:
        return decoding.result(seconds)
    except TimeoutError:
        return None


def judged(
    answer: EngineAnswer | None, met: Met, references: Mapping[str, tuple[int, ...]], alone: float
) -> Found:
    """What an answer is worth; ``alone`` are the seconds to the first token without a fault."""
    if answer is None:
        return Found(None, None, "none")
    if answer.error or answer.first_token_seconds is None:
        return Found(None, None, f"failed: {answer.error}")
    first = met.submitted + answer.first_token_seconds - met.fault
    equal = [name for name, tokens in references.items() if tokens == answer.token_ids]
    return Found(max(0.0, first - alone), first, " and ".join(equal) or "WRONG")


def table(found: Mapping[str, Mapping[str, Found]], wait: float) -> Iterator[str]:
    """A line a fault: seconds to the report with each connector, and of the first as a part of the second."""
    yield f"{'fault':<10}{'kvd':>12}{'stock':>12}{'kvd/stock':>12}   answers"
    for fault in FAULTS:
        pair = [found.get(way, {}).get(fault) for way in ("kvd", "stock")]
        if not any(pair):
            continue
        times = [one.report if one else None for one in pair]
        shown = [_shown(one, wait) for one in pair]
        answers = ", ".join(one.answer for one in pair if one)
        yield f"{fault:<10}{shown[0]:>12}{shown[1]:>12}{_ratio(times[0], times[1], pair[1], wait):>12}   {answers}"


def _shown(found: Found | None, wait: float) -> str:
    if found is None:
        return "-"
    if found.report is not None:
        return f"{found.report:.2f} s"
    return f"> {wait:.0f} s" if found.answer == "none" else "failed"


def _ratio(kvd: float | None, stock: float | None, answered: Found | None, wait: float) -> str:
    if kvd is None or answered is None or answered.answer == "WRONG":
        return "-"
    if stock is not None:
        return f"{kvd / max(stock, 1e-3):.3f}"
    return f"< {kvd / wait:.3f}" if answered.answer == "none" else "-"


@contextmanager
def kvd_pair(folder: Path, options: argparse.Namespace) -> Iterator[Pair]:
    """Engines with KvdConnector beside their kvds."""
    with two_hosts(folder / "kvd") as hosts, engines() as start:
        specs = [
            replace(spec(folder, "kvd", role, options.model), kv_transfer_config=config)
            for role, config in (
                (role, transfer_config(host, engine_id(host), role, extra={"lease_seconds": LEASE}))
                for host, role in zip(hosts, ("kv_producer", "kv_consumer"), strict=True)
            )
        ]
        yield ready([start(one) for one in specs], options)


@contextmanager
def stock_pair(folder: Path, options: argparse.Namespace) -> Iterator[Pair]:
    """Engines with vLLM's own connector."""
    with engines() as start:
        specs = []
        for role in ("kv_producer", "kv_consumer"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            config = {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "engine_id": f"stock-{role}",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"num_threads": 1, "kv_lease_duration": int(LEASE)},
            }
            made = spec(folder, "stock", role, options.model)
            env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            specs.append(replace(made, kv_transfer_config=config, env={**made.env, **env}))
        yield ready([start(one) for one in specs], options)


def ready(started: Sequence[EngineProcess], options: argparse.Namespace) -> Pair:
    """The pair, once both take requests."""
    for engine in started:
        engine.wait_ready(START_SECONDS)
    dice = random.Random(options.seed)  # noqa: S311 - to be had again, not to be secret
    return Pair(started[0], started[1], dice, options.wait)


def spec(folder: Path, way: str, role: str, model: str) -> EngineSpec:
    """An engine without its connector."""
    tiny = MODELS[model]
    return EngineSpec(
        model=write_model(model, folder / "models"),
        work_dir=folder / way / role,
        log_path=folder / way / f"{role}.log",
        dtype=tiny.dtype,
        max_model_len=1024,
        max_num_seqs=1 if tiny.name in ONE_AT_A_TIME else 8,
        kv_cache_memory_bytes=CACHE_BYTES if role == "kv_producer" else CACHE_BYTES * 4,
        enable_prefix_caching=tiny.name not in NO_PREFIX_CACHING,
        forced_first_tokens=role == "kv_consumer",
        cache_dir=folder / "cache",
        env={"UCX_TLS": "tcp,self"},
    )


def _forget(engine: EngineProcess) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not reset_prefix_cache(engine):
        if time.monotonic() > deadline:
            raise SystemExit("the decoder holds blocks of requests that are over")
        time.sleep(0.05)


def _say(what: str) -> None:
    sys.stderr.write(what + "\n")
    sys.stderr.flush()


def _names(text: str, known: Sequence[str]) -> list[str]:
    given = text.split(",")
    if unknown := [name for name in given if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
    return [name for name in known if name in given]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama", choices=sorted(MODELS))
    parser.add_argument("--faults", default=",".join(FAULTS), type=lambda text: _names(text, list(FAULTS)))
    parser.add_argument("--connectors", default="kvd,stock", type=lambda text: _names(text, ["kvd", "stock"]))
    parser.add_argument("--wait", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
