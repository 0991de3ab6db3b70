"""The stages of a run in the order in which they are worth most, and how long each may take."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu import poisoned, prefixes, steps
from benchmarks.gpu.asking import Mode
from benchmarks.gpu.correctness import check, watch
from benchmarks.gpu.faults import forced, killed, stopped
from benchmarks.gpu.fleet import FIRST_RUNNER, JOINED, Fleet, Pair, PairSpec, Way
from benchmarks.gpu.losing import tried
from benchmarks.gpu.pushing import beside, overlap
from benchmarks.gpu.timing import firsts, in_turns, warm
from benchmarks.gpu.waves import Stage

OURS: tuple[Way, ...] = ("direct", "nixl", "mooncake")
BOTH: tuple[Mode, ...] = ("pull", "push")
ONE_GROUP = ("dense", "mla")
PAIRS = 4
"""Of each way whose first requests are measured."""


def same_bytes(fleet: Fleet, pair: Pair, modes: Sequence[Mode], lengths: Sequence[int]) -> list[str]:
    """Bytes and answers of requests in these modes, of these lengths; those that were wrong."""
    tried(fleet, pair, "watch", functools.partial(watch, pair))
    wrong = []
    for tokens in lengths:
        for mode in modes:
            work = functools.partial(check, fleet.report, pair, mode, tokens, fleet.sizes.answer)
            if not tried(fleet, pair, f"{mode} {tokens}", work):
                wrong.append(f"{mode} {tokens}")
    return wrong


def transfers(fleet: Fleet, running: Sequence[Pair]) -> dict[str, list[str]]:
    """The dense model at one block size, pulled: ours beside vLLM's connectors."""
    warm(fleet, running, fleet.sizes.all)
    in_turns(fleet, running, ("pull",), 3 if fleet.quick else 6)
    return {}


def first_requests(fleet: Fleet, running: Sequence[Pair]) -> dict[str, list[str]]:
    """What the first hand-over of each pair takes, and later ones of its length."""
    firsts(fleet, running, "pull", fleet.sizes.short, 3 if fleet.quick else 6)
    return {}


def hidden(fleet: Fleet, running: Sequence[Pair]) -> dict[str, list[str]]:
    """Push beside pull on engines that are laid out for pushes."""
    warm(fleet, running, (fleet.sizes.long,))
    overlap(fleet, running, 3 if fleet.quick else 6)
    return {}


def pushed_beside(fleet: Fleet, running: Sequence[Pair]) -> dict[str, list[str]]:
    """Prefills that are pushed beside such that are not, in the same engines."""
    warm(fleet, running, (fleet.sizes.middle, fleet.sizes.long))
    beside(fleet, running, 10 if fleet.quick else 20)
    return {}


def bare(fleet: Fleet, _: Sequence[Pair]) -> Mapping[str, Sequence[str]]:
    """What the machine and the bare engines do. Raises `RuntimeError` where one of them did not work."""
    source, target = fleet.apart if fleet.device == "cuda" else ("cpu", "cpu")
    size = (1 << 30) if fleet.device == "cuda" else (64 << 20)
    environment = os.environ | {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "MC_INTRANODE_NVLINK": "1"}
    failed = []
    for what in ("copy", "nixl", "mooncake"):
        said, complaint = _program("ceilings", what, source, target, str(size), env=environment)
        for found in said[:1]:
            fleet.report.note("ceiling", gpus=(source, target), **found)
            fleet.report.say(f"{found}")
        if not said:
            failed.append(what)
            fleet.report.note("failed", ceiling=what, error=complaint[-3000:])
            fleet.report.say(f"{what}: failed: {complaint[-600:]}")
    if failed:
        raise RuntimeError(f"did not work: {', '.join(failed)}")
    return {}


def zeroed(fleet: Fleet, _: Sequence[Pair]) -> Mapping[str, Sequence[str]]:
    """What zeroes the rest of a block, alone. Raises `RuntimeError` where a byte was not what it must be."""
    said, complaint = _program("zeroing", "0" if fleet.device == "cuda" else "cpu", env=os.environ)
    for found in said:
        fleet.report.note("zeroing", gpus=("0", "0"), **found)
        fleet.report.say(f"{found}")
    if not said or said[-1].get("more", True) or not all(found["right"] for found in said):
        raise RuntimeError(f"did not work: {complaint[-600:]}")
    return {}


def _program(name: str, *arguments: str, env: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """What a module of this package printed as results, and all else it said."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False, env=env)
        said, complaint = done.stdout, done.stderr or done.stdout
    except subprocess.TimeoutExpired as error:
        said, complaint = error.stdout.decode() if isinstance(error.stdout, bytes) else "", str(error)
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines], complaint


def failures(fleet: Fleet, pair: Pair) -> list[str]:
    """A forced miss, a prefiller that stands still, one that is killed; those that went wrong."""
    tokens = fleet.sizes.long
    warm(fleet, [pair], (tokens,))
    into_the_load = 0.004 if fleet.device == "cuda" else 0.05
    works = {
        "forced in flight": functools.partial(forced, fleet, pair, tokens, "flight"),
        "forced before": functools.partial(forced, fleet, pair, tokens, "before"),
        "stopped": functools.partial(stopped, fleet, pair, tokens),
        "killed": functools.partial(killed, fleet, pair, tokens, into_the_load),
    }
    return [name for name, work in works.items() if not tried(fleet, pair, name, work)]


def step_times(fleet: Fleet, running: Sequence[Pair]) -> dict[str, list[str]]:
    """Steps without a connector, with an idle and with a busy one."""
    steps.measure(fleet, running, 3 if fleet.quick else 6)
    return {}


def _smoke() -> Stage:
    def each(fleet: Fleet, pair: Pair) -> list[str]:
        return same_bytes(fleet, pair, ("pull",), (fleet.sizes.short, fleet.sizes.middle))

    return Stage("smoke", functools.partial(_pairs_of, kind="dense"), each, usual=False)


def _kind(name: str) -> Stage:
    return Stage(name, functools.partial(_pairs_of, kind=name), _every_byte)


def _unequal(kind: str) -> Stage:
    """One prefilling worker and two decoding ones on two GPUs."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        longest = fleet.sizes.middle
        return [
            PairSpec(kind=kind, way=way, tp=(1, 2), gpus=("0", "0,1"), longest=longest, mode=mode, env=env)
            for mode, env in _modes(kind)
            for way in ("direct", "nixl")
        ]

    return Stage(f"tp-{kind}", pairs, _every_byte, gpus=2)


def _poisoned(kind: str) -> Stage:
    """One worker and two, each prefilling for the other, with blocks of unequal sizes, into poisoned memory."""
    made = functools.partial(poisoned.pairs, kind=kind)
    return Stage(f"poisoned-{kind}", made, poisoned.every_direction, seconds=90.0, gpus=2, usual=False)


def _other_kernels() -> Stage:
    """The same with kernels that vLLM does not take by itself: whether they mind what is left is theirs."""

    def made(fleet: Fleet) -> list[PairSpec]:
        kinds = [name for name in ("mla-flashmla", "dense-triton") if name in fleet.kinds]
        return [spec for kind in kinds for spec in poisoned.pairs(fleet, kind, ("direct",))]

    return Stage("poisoned-kernels", made, poisoned.every_direction, seconds=90.0, gpus=2, usual=False)


def _every_byte(fleet: Fleet, pair: Pair) -> list[str]:
    modes: Sequence[Mode] = BOTH if pair.spec.mode == "push" else ("pull",)
    # Lengths that end within a block, and one on the edge of blocks.
    return same_bytes(fleet, pair, modes, (fleet.sizes.short - 7, fleet.sizes.middle))


def _pairs_of(fleet: Fleet, kind: str) -> list[PairSpec]:
    longest = fleet.sizes.middle
    return [
        PairSpec(kind=kind, way=way, longest=longest, gpus=fleet.apart, mode=mode, env=env)
        for mode, env in _modes(kind)
        for way in OURS
    ]


def _modes(kind: str) -> tuple[tuple[Mode, dict[str, str]], ...]:
    """Engines for pushes, which also pull; where there is one group the memory of engines for pulls is another."""
    return (("push", {}), ("pull", FIRST_RUNNER)) if kind in ONE_GROUP else (("push", {}),)


def _staged() -> Stage:
    """Engines whose GPU memory no transfer engine is shown."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        spec = functools.partial(PairSpec, way="staged", longest=fleet.sizes.middle, gpus=fleet.apart)
        return [spec(kind=kind) for kind in ("dense", "gdn")]

    return Stage("staged", pairs, _every_byte)


def _staged_times() -> Stage:
    """Pulls by way of the hosts, beside those that are not."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        spec = functools.partial(PairSpec, kind="dense", mode="pull", gpus=fleet.apart, env=FIRST_RUNNER)
        return [spec(way=way, block=fleet.sizes.blocks[0]) for way in ("staged", "nixl")]

    return Stage("staged-times", pairs, together=transfers, seconds=100.0, usual=False)


def _times(name: str, which: int) -> Stage:
    def pairs(fleet: Fleet) -> list[PairSpec]:
        ways: tuple[Way, ...] = (*OURS, "stock-nixl", "stock-mooncake")
        spec = functools.partial(
            PairSpec,
            kind="dense",
            mode="pull",
            block=fleet.sizes.blocks[which],
            gpus=fleet.apart,
            env=FIRST_RUNNER,
        )
        return [*(spec(way=way) for way in ways), spec(way="stock-nixl", options=JOINED)]

    return Stage(name, pairs, together=transfers, seconds=200.0)


def _checksums() -> Stage:
    """Loads whose KV is added up on both sides beside loads whose KV is not."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        spec = functools.partial(PairSpec, kind="dense", mode="pull", gpus=fleet.apart, env=FIRST_RUNNER)
        block = fleet.sizes.blocks[0]
        return [
            spec(way=way, block=block, options={"kv_checksum": which}, label=f"sums-{which}")
            for way in ("direct", "nixl")
            for which in ("off", "all")
        ]

    return Stage("checksums", pairs, together=transfers, seconds=100.0, usual=False)


def _pieces() -> Stage:
    """Loads through transfer engines in one piece and in several; direct ones below 2 GiB are one launch anyway."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        spec = functools.partial(PairSpec, kind="dense", mode="pull", gpus=fleet.apart, env=FIRST_RUNNER)
        block = fleet.sizes.blocks[1]
        return [
            spec(way=way, block=block, options={"piece_bytes": size << 20}, label=f"{size}m")
            for way in ("mooncake", "nixl")
            for size in (1024, 256, 64)
        ]

    return Stage("pieces", pairs, together=transfers, seconds=100.0, usual=False)


def _firsts() -> Stage:
    """Several pairs of each way: a pair has one first request, and one figure says little."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        spec = functools.partial(
            PairSpec,
            kind="dense",
            mode="pull",
            block=fleet.sizes.blocks[0],
            gpus=fleet.apart,
            env=FIRST_RUNNER,
            longest=fleet.sizes.middle,
        )
        ways: tuple[Way, ...] = (*OURS, "stock-nixl")
        return [spec(way=way, label=str(number)) for number in range(PAIRS) for way in ways]

    return Stage("first", pairs, together=first_requests, seconds=100.0, usual=False)


def _hidden(name: str, which: int) -> Stage:
    def pairs(fleet: Fleet) -> list[PairSpec]:
        block = fleet.sizes.blocks[which]
        return [PairSpec(kind="dense", way=way, block=block, gpus=fleet.apart) for way in OURS]

    return Stage(name, pairs, together=hidden, seconds=100.0)


def _beside(name: str, *, eager: bool) -> Stage:
    """One pair by itself: nothing else runs on its processors."""

    def pairs(fleet: Fleet) -> list[PairSpec]:
        block = fleet.sizes.blocks[0]
        plain = eager or fleet.device != "cuda"
        return [PairSpec(kind="dense", way="direct", block=block, gpus=fleet.apart, eager=plain)]

    return Stage(name, pairs, together=pushed_beside, seconds=100.0, usual=False)


def _faults(kind: str) -> Stage:
    def pairs(fleet: Fleet) -> list[PairSpec]:
        # Two prompts do not fit at once: what comes late would land in the other's blocks.
        options = {"load_timeout": 3.0}
        return [
            PairSpec(kind=kind, way=way, gpus=fleet.apart, mode="pull", options=options, room=1.6)
            for way in OURS
        ]

    return Stage(f"faults-{kind}", pairs, failures, seconds=90.0)


def _steps() -> Stage:
    def pairs(fleet: Fleet) -> list[PairSpec]:
        spec = functools.partial(
            PairSpec,
            kind="dense",
            gpus=fleet.apart,
            eager=fleet.device != "cuda",
            block=fleet.sizes.blocks[0],
            env=FIRST_RUNNER,
        )
        ways = [spec(way="none")]
        # The stock connector shows what of an idle one's cost is vLLM's own.
        ways += [spec(way=way, mode="pull") for way in ("stock-nixl", "direct", "nixl")]
        return [*ways, spec(way="direct")]

    return Stage("steps", pairs, together=step_times, seconds=260.0)


STAGES = (
    _smoke(),
    _pieces(),
    _staged_times(),
    _checksums(),
    _firsts(),
    _beside("beside", eager=True),
    _beside("beside-graphs", eager=False),
    Stage("bare", lambda _: (), together=bare, seconds=90.0, least=20.0),
    Stage("zeroing", lambda _: (), together=zeroed, seconds=50.0, least=20.0),
    _kind("dense"),
    _times("block-small", 0),
    _hidden("hidden-small", 0),
    *map(_kind, ("gdn", "mamba2", "gemma3", "mla")),
    _times("block-large", 1),
    _hidden("hidden-large", 1),
    _staged(),
    *map(_faults, ("dense", "gdn", "mamba2")),
    *map(_unequal, ("dense", "gdn", "mamba2")),
    *map(_poisoned, ("gdn", "mamba2", "dense", "mla")),
    _other_kernels(),
    Stage("prefixes", prefixes.pairs, together=prefixes.measure, seconds=150.0, usual=False),
    Stage("prefixes-kinds", prefixes.kinds, prefixes.each, usual=False),
    _steps(),
)
