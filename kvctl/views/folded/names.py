"""Sets of names in few words: ``decode-{0..63}``, ``10.0.0.{1..4}:7766``, ``tp{0..7}.pp{0,1}``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NUMBER = re.compile(r"([0-9]{1,18})")
MOST_RUNS = 4
"""Runs of numbers that one pair of braces holds; of more the first ones and the last."""
MOST_SETS = 3
"""Sets that stand beside each other; of more the first ones and the last."""

Fields = tuple[tuple[str, ...], ...]
"""For each number of a name the values that it takes, as they are written."""


def pattern(name: str) -> tuple[str, ...]:
    """What a name is without its numbers: names of one pattern differ in numbers alone."""
    return tuple(NUMBER.split(name)[::2])


def name_set(names: Iterable[str]) -> str:
    """The names in few words. Braces hold exactly these numbers: two pairs of braces mean each with each."""
    by_pattern: dict[tuple[str, ...], dict[Fields, None]] = {}
    for name in names:
        numbers = tuple((number,) for number in NUMBER.split(name)[1::2])
        by_pattern.setdefault(pattern(name), {})[numbers] = None
    sets = [
        _written(texts, fields)
        for texts, found in by_pattern.items()
        for fields in _joined(list(found), len(texts) - 1)
    ]
    return ", ".join(_shortened(sets, MOST_SETS))


def _joined(found: Sequence[Fields], count: int) -> list[Fields]:
    """Names joined number by number, the last one first: those that are alike in all others become one."""
    sets = list(found)
    for at in reversed(range(count)):
        groups: dict[Fields, list[str]] = {}
        for fields in sets:
            groups.setdefault((*fields[:at], *fields[at + 1 :]), []).extend(fields[at])
        sets = [(*others[:at], _in_order(values), *others[at:]) for others, values in groups.items()]
    return sets


def _in_order(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values), key=lambda value: (int(value), len(value))))


def _written(texts: Sequence[str], fields: Fields) -> str:
    return texts[0] + "".join(_braces(values) + text for values, text in zip(fields, texts[1:], strict=True))


def _braces(values: Sequence[str]) -> str:
    """``7`` of one number, ``{0..63}`` or ``{0..3,7}`` of several. Zeros in front stay: ``{07..12}``."""
    if len(values) == 1:
        return values[0]
    runs: list[list[str]] = []
    for value in values:
        if runs and _follows(runs[-1][-1], value):
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return "{" + ",".join(_shortened([_run(run) for run in runs], MOST_RUNS)) + "}"


def _run(run: Sequence[str]) -> str:
    if len(run) == 1:
        return run[0]
    return f"{run[0]}{',' if int(run[1]) - int(run[0]) == 1 else '..'}{run[1]}"


def _follows(before: str, value: str) -> bool:
    """Whether the next number is written in the same way: 9 and 10, 09 and 10, not 9 and 010."""
    padded = before.startswith("0") or value.startswith("0")
    return int(value) == int(before) + 1 and (not padded or len(before) == len(value) or before == "0")


def _shortened(parts: list[str], most: int) -> list[str]:
    return parts if len(parts) <= most + 1 else [*parts[:most], "...", parts[-1]]
