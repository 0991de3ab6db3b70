"""Runs a sweep over backends, directions, sizes and fragmentations, with the ceilings in the same rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvctl.bench.cases import MovedRequest, requests
from kvctl.bench.moving import STAGES
from kvctl.bench.pair import BackendRun, PairScene, ProcessPair, pair
from kvctl.bench.remote import ServeTarget
from kvctl.bench.transport import has_rdma, is_slow
from kvctl.cli.numbers import rate
from kvctl.views.measuring.benchmark import Ceiling, Measurement, Warned, quantiles
from kvd.backends.contract import Operation

LARGE = 64 << 20
"""Bytes of a ceiling's copy: what one region has of them at most."""
LEAST_ROUNDS = 1
SLOW_SHARE = 0.5
"""A direction that moves one large piece at less than this share of the other's rate is on a slow path."""


@dataclass(frozen=True)
class Sweep:
    """What is measured. ``sizes`` are pairs of tokens and requests at a time that fit in the scene's memory.

    ``seconds`` is for one direction of one backend: rounds end then, but for the first `LEAST_ROUNDS`, and cases that
    were not begun are left out, but for the first.
    """

    sizes: Sequence[tuple[int, int]]
    fragmentations: Sequence[str]
    operations: Sequence[Operation]
    rounds: int
    verify: bool = True
    seconds: float = math.inf


@dataclass(slots=True)
class Case:
    """One measurement on its way."""

    tokens: int
    concurrency: int
    fragmentation: str
    requests: list[MovedRequest]
    answers: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What the case's bytes are made of."""
        return f"{self.tokens} x {self.concurrency}, {self.fragmentation}, "


Ceilings = dict[str, list[float]]
TellStep = Callable[[str], None]


class Difference(Exception):
    """Bytes landed that are not the right ones."""


def steps(sweep: Sweep, backends: int) -> int:
    """How often `measure` will tell of its progress, at most."""
    return backends * len(sweep.operations) * (len(sweep.sizes) * len(sweep.fragmentations) + sweep.rounds)


@dataclass(frozen=True)
class Measured:
    """What one backend did, what to warn of, and what was left out."""

    rows: list[Measurement]
    warnings: list[Warned]
    notes: list[str]


def measure(
    place: PairScene,
    backend: BackendRun,
    sweep: Sweep,
    folder: Path,
    told: TellStep,
    to: ServeTarget | None = None,
) -> Measured:
    """All measurements of one backend, with the source at ``to``. ``told`` is called after each step.

    Raises `WorkerFailed` where the backend cannot do it, `Difference` where a byte landed wrong, `PeerUnreachable`
    where nothing answers at ``to``.
    """
    found: dict[Operation, tuple[list[Case], Ceilings]] = {}
    with pair(place, backend, folder, to) as both:
        for operation in sweep.operations:
            if operation == "read" or both.lands:
                found[operation] = _direction(both, place, sweep, operation, told)
    # UCX's log is whole when the processes have ended.
    transports = {operation: both.transport(operation) for operation in found}
    rows = [
        _measurement(case, ceilings, (backend.name, operation, transports[operation]), sweep)
        for operation, (cases, ceilings) in found.items()
        for case in cases
    ]
    large = {operation: median(ceilings["large"]) for operation, (_, ceilings) in found.items()}
    return Measured(rows, list(_slow(backend, transports, large, to)), list(_left_out(backend, sweep, found)))


def _direction(
    both: ProcessPair, place: PairScene, sweep: Sweep, operation: Operation, told: TellStep
) -> tuple[list[Case], Ceilings]:
    """All cases of one direction: each once for its bytes, then rounds of ceilings and cases in turn."""
    source = place.sources[place.plan.sources[0]]
    cases = [
        Case(tokens, count, kind, requests(place.reader, source, tokens, count, kind))
        for tokens, count in sweep.sizes
        for kind in sweep.fragmentations
    ]
    what, until = f"{both.backend.name} {operation}", time.monotonic() + sweep.seconds
    for number, case in enumerate(cases):
        if number and time.monotonic() > until:
            del cases[number:]
            break
        _verified(both, case, operation, verify=sweep.verify)
        told(f"{what}, {case.tokens} tokens, {case.fragmentation}")
    ceilings: Ceilings = {"memcpy": [], "large": [], "tcp": []}
    for number in range(sweep.rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > until:
            break
        best = {
            "memcpy": both.memcpy(LARGE),
            "large": both.large(operation, LARGE),
            "tcp": both.stream(LARGE),
        }
        rates = {name: answer["bytes"] / answer["seconds"] for name, answer in best.items()}
        for name, value in rates.items():
            ceilings[name].append(value)
        for case in cases:
            answer = both.move(case.requests, operation)
            case.answers.append(answer)
            moved = sum(one["bytes"] for one in answer["requests"]) / answer["seconds"]
            for name, value in rates.items():
                case.ratios.setdefault(name, []).append(moved / value)
        told(f"{what}, round {number + 1} of {sweep.rounds}")
    return cases, ceilings


def _verified(both: ProcessPair, case: Case, operation: Operation, *, verify: bool) -> None:
    """Move once, which also prepares what is prepared once, and compare every byte."""
    if verify:
        both.fill(case.requests, case.key)
    both.move(case.requests, operation)
    if verify and (difference := both.difference(case.requests, case.key)):
        raise Difference(f"{both.backend.name} {operation}, {case.fragmentation}: {difference}")


def _measurement(
    case: Case, ceilings: Ceilings, way: tuple[str, Operation, str], sweep: Sweep
) -> Measurement:
    backend, operation, transport = way
    each = [one for answer in case.answers for one in answer["requests"]]
    return Measurement(
        backend=backend,
        operation=operation,
        transport=transport,
        tokens=case.tokens,
        concurrency=case.concurrency,
        fragmentation=case.fragmentation,
        rounds=len(case.answers),
        bytes=each[0]["bytes"],
        descriptors=each[0]["descriptors"],
        verified=sweep.verify,
        bytes_per_second=median(
            sum(one["bytes"] for one in answer["requests"]) / answer["seconds"] for answer in case.answers
        ),
        stages={name: quantiles(one["stages"][name] for one in each) for name in STAGES},
        ceilings=tuple(
            Ceiling(name=name, bytes_per_second=median(ceilings[name]), ratio=median(case.ratios[name]))
            for name in ("memcpy", "large", "tcp")
        ),
    )


def _left_out(
    backend: BackendRun, sweep: Sweep, found: dict[Operation, tuple[list[Case], Ceilings]]
) -> Iterable[str]:
    wanted = len(sweep.sizes) * len(sweep.fragmentations)
    for operation, (cases, _) in found.items():
        if len(cases) < wanted:
            last = cases[-1]
            yield (
                f"{backend.name} {operation}s after {last.tokens} tokens {last.concurrency} at a time,"
                f" {last.fragmentation}: the {sweep.seconds:.1f} s for them were over (--quick)"
            )


def _slow(
    backend: BackendRun,
    transports: dict[Operation, str],
    large: dict[Operation, float],
    to: ServeTarget | None,
) -> Iterable[Warned]:
    """One warning for each direction that is on a slow path, by its transport or by its rate."""
    for operation, transport in transports.items():
        other: Operation = "write" if operation == "read" else "read"
        message = ""
        if is_slow(transport) and to is None:
            message = f"{operation}s between two processes of this host go over {transport}"
            message += f", {other}s over {transports[other]}" if other in transports else ""
            if operation == "write" and not backend.environment:
                message += ": a window takes nothing over shared memory on purpose (docs/backends/nixl.md)"
            else:
                message += ": look at UCX_TLS and UCX_NET_DEVICES, and at `ucx_info -d`"
        elif is_slow(transport) and has_rdma():
            message = (
                f"{operation}s go over {transport} although this host has RDMA devices:"
                " look at UCX_TLS and UCX_NET_DEVICES on both, and at `ucx_info -d`"
            )
        elif not is_slow(transport) and other in large and large[operation] < SLOW_SHARE * large[other]:
            message = (
                f"{operation}s one large piece at {rate(large[operation])} and"
                f" {other}s it at {rate(large[other])}; compare what moves the bytes in each direction (-o wide)"
            )
        if message:
            yield Warned(code="SLOW_PATH", message=f"{backend.name} {message}")
