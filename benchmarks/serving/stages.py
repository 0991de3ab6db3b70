"""The pairs that are deployed: which ways, with which memory, and how many prompts their caches hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.asking import Mode
from benchmarks.gpu.fleet import FIRST_RUNNER, JOINED, Fleet, Pair, PairSpec
from benchmarks.gpu.waves import Stage
from benchmarks.serving.bench_serve import bench_serve
from benchmarks.serving.cells import DENSE, HYBRID, WIDE, ServingCell
from benchmarks.serving.measuring import measure

ROUNDS = 3
AT_ONCE = 64
OF_STOCK_HYBRIDS = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""Without it stock NIXL ends the engine with an assertion."""
DEPLOYED: dict[str, Any] = {
    "max_num_seqs": AT_ONCE,
    "async_scheduling": True,
    # Graphs of decode steps alone: those of prefills need torch.compile, which takes minutes an engine.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64],
    },
}


def serve(
    fleet: Fleet, running: Sequence[Pair], cells_of: Mapping[str, Sequence[ServingCell]]
) -> dict[str, list[str]]:
    """All cells of this device; on hybrids engines for pushes also pull, since their memory is the same."""

    def modes(pair: Pair) -> Sequence[Mode]:
        both = pair.spec.kind == "gdn" and pair.spec.way == "direct"
        return ("pull", "push") if both else (pair.spec.mode,)

    return measure(fleet, running, cells_of[fleet.device], modes, _rounds(fleet))


def _rounds(fleet: Fleet) -> int:
    return fleet.rounds or (1 if fleet.quick else ROUNDS)


def _spec(fleet: Fleet, kind: str, longest: int, room: float, **what: Any) -> PairSpec:
    cuda = fleet.device == "cuda"
    return PairSpec(
        kind=kind,
        gpus=fleet.apart,
        eager=not cuda,
        longest=longest,
        room=room,
        arguments=DEPLOYED if cuda else {"max_num_seqs": AT_ONCE},
        **what,
    )


def _dense(fleet: Fleet) -> list[PairSpec]:
    """Pulls and stock NIXL once with all layers of a block together, pushes and the others with a memory for each."""
    spec = _attending(fleet, "dense", DENSE)
    return _several(
        fleet,
        spec(way="direct", mode="pull"),
        spec(way="stock-nixl", mode="pull", options=JOINED),
        spec(way="nixl", mode="pull"),
        spec(way="stock-nixl", mode="pull"),
        spec(way="direct", mode="push"),
        spec(way="none", mode="pull"),
        spec(way="mooncake", mode="pull"),
        spec(way="stock-mooncake", mode="pull"),
    )


def _wide(fleet: Fleet) -> list[PairSpec]:
    """The ways of the dense model that matter most: an engine of this one takes 15 GB of its GPU."""
    spec = _attending(fleet, "wide", WIDE)
    return _several(
        fleet,
        spec(way="direct", mode="pull"),
        spec(way="stock-nixl", mode="pull", options=JOINED),
        spec(way="direct", mode="push"),
        spec(way="none", mode="pull"),
    )


def _attending(
    fleet: Fleet, kind: str, cells_of: Mapping[str, Sequence[ServingCell]]
) -> Callable[..., PairSpec]:
    """Makes pairs of a model that has attention alone, with room for five of its longest prompts."""
    longest = max(cell.longest for cell in cells_of[fleet.device])
    block = fleet.sizes.blocks[0]
    return functools.partial(_spec, fleet, kind, longest, 5.0, block=block, env=FIRST_RUNNER)


def _several(fleet: Fleet, *specs: PairSpec) -> list[PairSpec]:
    """As many pairs of each as are wanted: engines that are started alike differ by up to a fifth."""
    return [
        dataclasses.replace(spec, label=str(number) if number > 1 else "")
        for number in range(1, fleet.pairs + 1)
        for spec in specs
    ]


def _hybrid(fleet: Fleet) -> list[PairSpec]:
    """Engines of Gated DeltaNet; blocks are of vLLM's own size."""
    longest = max(cell.longest for cell in HYBRID[fleet.device])
    spec = functools.partial(_spec, fleet, "gdn", longest, 24.0)
    return _several(
        fleet,
        spec(way="direct", mode="push"),
        spec(way="stock-nixl", mode="pull", env=OF_STOCK_HYBRIDS),
        spec(way="nixl", mode="pull"),
        spec(way="none", mode="pull"),
    )


def as_users_do(fleet: Fleet, _: Sequence[Pair]) -> Mapping[str, Sequence[str]]:
    """The dense pairs that a router can serve, as `vllm serve`; stock Mooncake has a router of its own."""
    specs = [one for one in _dense(fleet) if one.way not in ("none", "mooncake", "stock-mooncake")]
    bench_serve(fleet, list(filter(fleet.wants, specs)), _rounds(fleet))
    return {}


STAGES = (
    Stage(
        "serve-gdn", _hybrid, together=functools.partial(serve, cells_of=HYBRID), seconds=90.0, least=100.0
    ),
    Stage(
        "serve-dense", _dense, together=functools.partial(serve, cells_of=DENSE), seconds=400.0, least=100.0
    ),
    Stage(
        "serve-wide",
        _wide,
        together=functools.partial(serve, cells_of=WIDE),
        seconds=300.0,
        least=120.0,
        usual=False,
    ),
    Stage("bench-serve", lambda _: (), together=as_users_do, seconds=400.0, least=120.0, usual=False),
)
