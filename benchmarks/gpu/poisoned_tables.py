"""The tables of loads into poisoned memory, and of what engines of different sizes answer alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.correctness import first_difference
from benchmarks.gpu.lines import Line, memory_of, sizes_of
from benchmarks.gpu.markdown import ms, size, table
from benchmarks.gpu.poisoned import clarity

_NEVER = "not measured"


def poisoned(lines: Sequence[Line]) -> str:
    """What was left of the poison, and whether a logit was not a number: with zeroing, without, computed alone."""
    found = _last(line for line in lines if line["what"] == "poisoned")
    rows = []
    for key, some in _by(found, ("kind", "way", "mode", memory_of, sizes_of, _blocks)).items():
        zeroed, bare = ([one for one in some if one["zeroing"] is on] for on in (True, False))
        bare = [one for one in bare if one.get("switched")]
        alone = [one["control"] for one in zeroed if one.get("control")]
        rows.append(
            (
                *key,
                ", ".join(str(one["tokens"]) for one in zeroed),
                sum(one.get("sums", 0) for one in zeroed),
                _bytes(zeroed),
                _left(zeroed),
                _left(bare),
                _nan(zeroed),
                _nan(bare),
                _nan(alone),
            )
        )
    return table(
        (
            "model", "backend", "mode", "memory", "TP", "block", "prompts", "sums compared", "bytes", "left",
            "left without zeroing", "not a number", "without zeroing", "computed alone",
        ),
        rows,
    )  # fmt: skip


def zeroing(lines: Sequence[Line]) -> str:
    """How long it takes to zero what a load leaves, and whether every byte was right."""
    found = {(one["shape"], one["layers"], one["blocks"]): one for one in lines if one["what"] == "zeroing"}
    return table(
        ("pages", "layers", "blocks", "runs", "bytes", "median", "device busy", "first", "every byte right"),
        (
            (
                *key,
                one.get("runs", ""),
                size(one.get("bytes")),
                ms(one.get("seconds")),
                ms(one.get("busy")),
                ms(one.get("first")),
                "yes" if one["right"] else f"NO {one.get('error', '')}"[:200],
            )
            for key, one in found.items()
        ),
    )


def parted(lines: Sequence[Line]) -> str:
    """How loaded answers compare with what both engines say alone."""
    found = _last(
        line for line in lines if line["what"] == "poisoned" and line["zeroing"] and not line["error"]
    )
    rows = []
    for key, some in _by(found, ("kind", sizes_of)).items():
        answers = [one["answers"] for one in some]
        other = [one for one in answers if one["decoder"]["parts"] is not None]
        rows.append(
            (
                *key,
                len(answers),
                len(answers) - len(other),
                sum(one["prefiller"]["parts"] is None for one in other),
                sum(one["alone"]["parts"] is not None for one in other),
                sum(one["alone"]["parts"] is None for one in other),
                *_clear([one["decoder"] for one in other], [one["decoder"] for one in answers]),
            )
        )
    return table(
        (
            "model", "TP", "loads", "the decoder's answer", "else: the prefiller's", "both part alone",
            "both agree alone", "best over second best where they part", "changes of that before",
        ),
        rows,
    )  # fmt: skip


def alone(lines: Sequence[Line]) -> str:
    """Answers of engines alone to the same prompts: of one size, and one worker's beside two's."""
    found = _last(line for line in lines if line["what"] == "alone" and not line["error"])
    rows = []
    for (kind,), some in _by(found, ("kind",)).items():
        by: dict[str, list[Line]] = {}
        for same in _by(some, ("tokens",)).values():
            for a, b in itertools.combinations(same, 2):
                sizes = sorted((a["tp"], b["tp"]))
                which = "{} and {}".format(*sizes)
                if sizes[0] == sizes[1]:
                    which += ", one block" if a["block"] == b["block"] else ", other block"
                parts = first_difference(a["answer"], b["answer"])
                by.setdefault(which, []).append(
                    {"parts": parts, **clarity(a["choices"], b["choices"], parts)}
                )
        for which, pairs in sorted(by.items()):
            other = [one for one in pairs if one["parts"] is not None]
            rows.append((kind, which, len(pairs), len(pairs) - len(other), *_clear(other, pairs)))
    return table(
        (
            "model", "workers of both", "answers compared", "equal", "best over second best where they part",
            "changes of that before",
        ),
        rows,
    )  # fmt: skip


def _clear(parting: Sequence[Line], everything: Sequence[Line]) -> tuple[str, str]:
    """The largest distances in logits."""
    gaps = [max(one["gaps"]) for one in parting if "gaps" in one]
    noise = [one["noise"] for one in everything]
    return (f"≤ {max(gaps):.3g}" if gaps else _NEVER), (f"≤ {max(noise):.3g}" if noise else _NEVER)


def _bytes(lines: Sequence[Line]) -> str:
    wrong = [
        f"{one['tokens']}: {one.get('why') or one.get('different')}" for one in lines if not one["equal"]
    ]
    return "equal" if not wrong else "DIFFERENT " + "; ".join(wrong)[:200]


def _left(lines: Sequence[Line]) -> str:
    if not lines:
        return _NEVER
    within, beyond = (sum(one[name] for one in lines) for name in ("within", "beyond"))
    elements = sum(one["elements"] for one in lines)
    share = f"{100 * (within + beyond) / elements:.1f} %" if within + beyond else "0"
    return share + (f", {within} of tokens" if within else "")


def _nan(lines: Sequence[Line]) -> str:
    return f"{sum(bool(one['nan']) for one in lines)} of {len(lines)}" if lines else _NEVER


def _blocks(line: Line) -> str:
    return "{} → {}".format(*line["blocks"])


def _by(lines: Iterable[Line], keys: Sequence[Any]) -> dict[tuple[Any, ...], list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        key = tuple(key(line) if callable(key) else line[key] for key in keys)
        found.setdefault(key, []).append(line)
    return found


def _last(lines: Iterable[Line]) -> list[Line]:
    """Of each kind of model what the last run has of it."""
    every = list(lines)
    last = {line["kind"]: line["run"] for line in every}
    return [line for line in every if line["run"] == last[line["kind"]]]
