"""What is asked of a pair: so many prompts of these lengths, at this rate or one at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCell:
    """One row of a table.

    ``lengths`` are prompt lengths in tokens and their weights. ``rate`` is in requests a second, 0 for one at a time.
    ``count`` requests a round, each answered with ``answer`` tokens.
    """

    name: str
    lengths: tuple[tuple[int, float], ...]
    rate: float
    count: int
    answer: int = 24

    @property
    def longest(self) -> int:
        """The longest prompt there may be."""
        return max(tokens for tokens, _ in self.lengths)


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt of ``tokens`` tokens, so many seconds after the first could have come."""

    after: float
    tokens: int


def arrivals(cell: ServingCell, number: int) -> list[PlannedPrompt]:
    """When which prompts come in one round: the same for every pair, others in another round.

    Gaps are exponential (a Poisson process) and stretched to the cell's rate, since few of them may be far off it.
    """
    source = random.Random(f"{cell.name} {number}")  # noqa: S311 - reproducible on purpose
    lengths = _lengths(cell)
    source.shuffle(lengths)
    if not cell.rate:
        return [PlannedPrompt(0.0, tokens) for tokens in lengths]
    gaps = [source.expovariate(cell.rate) for _ in lengths]
    stretch = len(lengths) / cell.rate / sum(gaps)
    times = [sum(gaps[: index + 1]) * stretch for index in range(len(gaps))]
    return [PlannedPrompt(after, tokens) for after, tokens in zip(times, lengths, strict=True)]


def _lengths(cell: ServingCell) -> list[int]:
    """As many of each length as its weight says, at least one."""
    whole = sum(weight for _, weight in cell.lengths)
    found = [
        tokens
        for tokens, weight in cell.lengths[1:]
        for _ in range(max(1, round(cell.count * weight / whole)))
    ]
    return [cell.lengths[0][0]] * (cell.count - len(found)) + found


def one_at_a_time(tokens: int, count: int) -> ServingCell:
    """The next request is sent when the one before has its last token."""
    return ServingCell(name=f"{tokens} tokens", lengths=((tokens, 1.0),), rate=0.0, count=count)


def at_rate(tokens: int, rate: float, seconds: float) -> ServingCell:
    """Prompts of one length at random times."""
    return ServingCell(
        name=f"{tokens} tokens, {rate:g}/s",
        lengths=((tokens, 1.0),),
        rate=rate,
        count=max(2, round(rate * seconds)),
    )


def mixed(lengths: Sequence[tuple[int, float]], rate: float, seconds: float) -> ServingCell:
    """Prompts of several lengths at random times."""
    return ServingCell(
        name=f"mix of {len(lengths)}, {rate:g}/s",
        lengths=tuple(lengths),
        rate=rate,
        count=max(len(lengths), round(rate * seconds)),
    )


DENSE = {
    "cuda": (
        one_at_a_time(512, 8),
        one_at_a_time(4096, 8),
        one_at_a_time(16000, 5),
        at_rate(4096, 10, 2.4),
        at_rate(4096, 30, 2.0),
        at_rate(4096, 50, 2.0),
        mixed(((512, 0.7), (4096, 0.25), (16000, 0.05)), 30, 2.0),
    ),
    "cpu": (one_at_a_time(64, 2), at_rate(128, 2, 1.0), mixed(((32, 0.7), (64, 0.25), (128, 0.05)), 4, 1.0)),
}
WIDE = {
    "cuda": (
        one_at_a_time(512, 8),
        one_at_a_time(4096, 8),
        one_at_a_time(16000, 4),
        at_rate(4096, 5, 2.4),
        at_rate(4096, 12, 2.5),
        at_rate(4096, 30, 1.5),
    ),
    "cpu": (one_at_a_time(64, 2), at_rate(128, 2, 1.0)),
}
HYBRID = {
    "cuda": (one_at_a_time(4096, 8), at_rate(4096, 30, 2.0)),
    "cpu": (one_at_a_time(64, 2), at_rate(64, 2, 1.0)),
}
