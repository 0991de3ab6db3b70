"""The stages of a run in the order in which they are worth most, and how long each may take."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu import steps
from benchmarks.gpu.asking import Mode
from benchmarks.gpu.correctness import check, watch
from benchmarks.gpu.faults import forced, killed, stopped
from benchmarks.gpu.fleet import STOCK, Fleet, Pair, PairSpec, Way, begin_pair
from benchmarks.gpu.models import write
from benchmarks.gpu.pushing import overlap
from benchmarks.gpu.timing import in_turns, warm
from kvctl.demo.deployment import engines
from kvctl.demo.errors import EngineError
from kvd.client.errors import ClientError

OURS: tuple[Way, ...] = ("direct", "nixl", "mooncake")


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a run: what it does, its most and least seconds, the GPUs it needs, whether it runs unasked."""

    name: str
    run: Callable[[Fleet], None]
    seconds: float
    least: float = 60.0
    gpus: int = 0
    usual: bool = True


@contextlib.contextmanager
def pairs(fleet: Fleet, specs: Sequence[PairSpec]) -> Iterator[list[Pair]]:
    """Running pairs, started at the same time and ended on the way out; those that do not start are left out."""
    specs = [spec for spec in specs if not fleet.ways or spec.way in fleet.ways]
    for kind in {spec.kind for spec in specs}:
        write(fleet.kinds[kind], fleet.lasting / "models")
    with engines() as start:
        began = time.monotonic()
        begun = []
        for spec in specs:
            begun.append(begin_pair(fleet, start, spec))
            if fleet.device == "cpu":
                _started(begun[-1])  # on few cores one after the other is faster
        yield [pair for pair in begun if _ready(fleet, pair, began)]


def one_by_one(fleet: Fleet, specs: Sequence[PairSpec]) -> Iterator[Pair]:
    """Each pair that runs: all started at the same time on GPUs, one after the other on CPUs, which are small hosts."""
    for some in [specs] if fleet.device == "cuda" else [[spec] for spec in specs]:
        with pairs(fleet, some) as running:
            yield from running


def smoke(fleet: Fleet) -> None:
    """The dense model with each of our backends: bytes and answers of pulls at two lengths."""
    specs = [PairSpec(kind="dense", way=way, longest=fleet.sizes.middle, gpus=fleet.apart) for way in OURS]
    wrong, seen = [], set()
    for pair in one_by_one(fleet, specs):
        seen.add(pair.spec.way)
        watch(pair)
        for tokens in (fleet.sizes.short, fleet.sizes.middle):
            work = functools.partial(check, fleet.report, pair, "pull", tokens, fleet.sizes.answer)
            if not _tried(fleet, pair, work):
                wrong.append(f"{pair.spec.name} {tokens}")
    _verdict(fleet, wrong, specs, seen)


def one_kind(name: str) -> Callable[[Fleet], None]:
    """The same for one kind."""
    return functools.partial(_kind, name=name)


def _kind(fleet: Fleet, name: str) -> None:
    # Lengths that end within a block, and one on the edge of blocks.
    lengths = (fleet.sizes.short - 7, fleet.sizes.middle)
    longest = fleet.sizes.middle
    specs = [
        PairSpec(kind=name, way=way, longest=longest, gpus=fleet.apart, split=fleet.kinds[name].split)
        for way in OURS
    ]
    wrong, seen = [], set()
    for pair in one_by_one(fleet, specs):
        seen.add(pair.spec.way)
        watch(pair)
        modes: tuple[Mode, ...] = ("pull", "push")
        wrong += [
            f"{pair.spec.name} {mode} {tokens}"
            for tokens in lengths
            for mode in modes
            if not _tried(
                fleet, pair, functools.partial(check, fleet.report, pair, mode, tokens, fleet.sizes.answer)
            )
        ]
    _verdict(fleet, wrong, specs, seen)


def transfers(fleet: Fleet, block: int) -> None:
    """The dense model at one block size: ours beside vLLM's connectors, then push beside pull."""
    ways: tuple[Way, ...] = (*OURS, "stock-nixl", "stock-mooncake")
    specs = [PairSpec(kind="dense", way=way, block=block, gpus=fleet.apart) for way in ways]
    rounds = 3 if fleet.quick else 6
    with pairs(fleet, specs) as running:
        for pair in running:
            warm(fleet, pair, fleet.sizes.all)
        in_turns(fleet, running, ("pull",), rounds)
        overlap(fleet, [pair for pair in running if pair.spec.way in OURS], rounds)
        _verdict(fleet, [], specs, {pair.spec.way for pair in running})


def bare(fleet: Fleet) -> None:
    """What the machine and the bare engines do."""
    source, target = fleet.apart if fleet.device == "cuda" else ("cpu", "cpu")
    size = (1 << 30) if fleet.device == "cuda" else (64 << 20)
    environment = os.environ | {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "MC_INTRANODE_NVLINK": "1"}
    for what in ("copy", "nixl", "mooncake"):
        command = [sys.executable, "-m", "benchmarks.gpu.ceilings", what, source, target, str(size)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=environment
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if lines:
            fleet.report.note("ceiling", gpus=fleet.apart, **json.loads(lines[0].removeprefix("RESULT ")))
            fleet.report.say(lines[0])
        else:
            fleet.report.note("failed", ceiling=what, error=(done.stderr or done.stdout)[-3000:])
            fleet.report.say(f"{what}: failed: {(done.stderr or done.stdout)[-600:]}")


def failures(fleet: Fleet, kind: str) -> None:
    """A forced miss, a prefiller that stands still, one that is killed; each of our backends."""
    options = {"load_timeout": 3.0}
    specs = [
        PairSpec(
            kind=kind, way=way, gpus=fleet.apart, split=fleet.kinds[kind].split, mode="pull", options=options,
            # Two prompts do not fit at once: what comes late would land in the other's blocks.
            room=1.6,
        )
        for way in OURS
    ]  # fmt: skip
    wrong, seen = [], set()
    for pair in one_by_one(fleet, specs):
        seen.add(pair.spec.way)
        tokens = fleet.sizes.long
        warm(fleet, pair, (tokens,))
        tried = {
            "forced in flight": functools.partial(forced, fleet, pair, tokens, "flight"),
            "forced before": functools.partial(forced, fleet, pair, tokens, "before"),
            "stopped": functools.partial(stopped, fleet, pair, tokens),
            "killed": functools.partial(
                killed, fleet, pair, tokens, 0.004 if fleet.device == "cuda" else 0.05
            ),
        }
        wrong += [f"{pair.spec.name} {name}" for name, work in tried.items() if not _tried(fleet, pair, work)]
    _verdict(fleet, wrong, specs, seen)


def unequal(fleet: Fleet, kind: str) -> None:
    """One prefilling worker and two decoding ones on two GPUs: bytes and answers."""
    ways: tuple[Way, ...] = ("direct", "nixl")
    specs = [
        PairSpec(
            kind=kind,
            way=way,
            tp=(1, 2),
            gpus=("0", "0,1"),
            split=fleet.kinds[kind].split,
            longest=fleet.sizes.middle,
        )
        for way in ways
    ]
    wrong, seen = [], set()
    for pair in one_by_one(fleet, specs):
        seen.add(pair.spec.way)
        watch(pair)
        modes: tuple[Mode, ...] = ("pull", "push")
        for mode in modes:
            for tokens in (fleet.sizes.short - 7, fleet.sizes.middle):
                work = functools.partial(check, fleet.report, pair, mode, tokens, fleet.sizes.answer)
                if not _tried(fleet, pair, work):
                    wrong.append(f"{pair.spec.name} {mode} {tokens}")
    _verdict(fleet, wrong, specs, seen)


def step_times(fleet: Fleet) -> None:
    """Steps without a connector, with an idle and with a busy one, in CUDA graphs."""
    graphs = fleet.device != "cuda"
    spec = functools.partial(
        PairSpec, kind="dense", gpus=fleet.apart, eager=graphs, block=fleet.sizes.blocks[0]
    )
    specs = [
        spec(way="none"),
        spec(way="direct", mode="pull"),
        spec(way="nixl", mode="pull"),
        spec(way="direct"),
    ]
    with pairs(fleet, specs) as running:
        steps.measure(fleet, running, 3 if fleet.quick else 6)
        _verdict(fleet, [], specs, {pair.spec.way for pair in running})


def _tried(fleet: Fleet, pair: Pair, work: Callable[[], bool]) -> bool:
    """One check; an engine that dies or does not answer is a result too."""
    try:
        return work()
    except (EngineError, ClientError, TimeoutError, RuntimeError, KeyError, IndexError) as error:
        text = f"{type(error).__name__}: {error}"
        fleet.report.note("failed", pair=pair.spec.name, work=str(work)[:300], error=text[-4000:])
        fleet.report.say(f"{pair.spec.name}: {text[:1500]}")
        return False


def _verdict(fleet: Fleet, wrong: list[str], specs: Sequence[PairSpec], seen: set[Way]) -> None:
    """Raise `RuntimeError` where something was wrong or did not start."""
    missing = sorted({spec.way for spec in specs if not fleet.ways or spec.way in fleet.ways} - seen)
    if wrong or missing:
        raise RuntimeError(f"wrong: {wrong}; did not start: {missing}")


def _started(pair: Pair) -> None:
    for engine in pair.engines:
        with contextlib.suppress(EngineError):
            engine.wait_ready(300.0)


def _ready(fleet: Fleet, pair: Pair, began: float) -> bool:
    """Wait for both engines; what keeps one from starting is a result."""
    for engine in pair.engines:
        try:
            engine.wait_ready(300.0)
        except EngineError as error:
            fleet.report.note("not started", pair=pair.spec.name, error=str(error)[-6000:])
            fleet.report.say(f"{pair.spec.name} did not start: {str(error)[-1500:]}")
            return False
    seconds = round(time.monotonic() - began, 1)
    ours = pair.spec.way not in (*STOCK, "none")
    geometry = pair.decode.ask_workers("kvb_geometry")[0] if ours else []
    fleet.report.note("started", pair=pair.spec.name, seconds=seconds, geometry=geometry)
    fleet.report.say(f"{pair.spec.name} is up after {seconds} s")
    return True


def _stages() -> tuple[Stage, ...]:
    found = [
        Stage("smoke", smoke, 175.0, usual=False),
        Stage("bare", bare, 90.0, least=20.0),
        Stage("dense", one_kind("dense"), 150.0),
        Stage("block-small", lambda fleet: transfers(fleet, fleet.sizes.blocks[0]), 240.0),
        *(Stage(name, one_kind(name), 200.0) for name in ("gdn", "mamba2", "gemma3", "mla")),
        Stage("block-large", lambda fleet: transfers(fleet, fleet.sizes.blocks[1]), 240.0),
        *(
            Stage(f"faults-{name}", functools.partial(failures, kind=name), 240.0)
            for name in ("dense", "gdn")
        ),
        *(
            Stage(f"tp-{name}", functools.partial(unequal, kind=name), 200.0, gpus=2)
            for name in ("dense", "gdn", "mamba2")
        ),
        Stage("steps", step_times, 300.0),
    ]
    return tuple(found)


STAGES = _stages()
