"""Results as tables take them: which of them count, and what they say in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

Line = dict[str, Any]
BY_LAYER, BY_BLOCK = "by layer", "by block"
"""Whether each layer has its memory, as stock connectors have it unless told otherwise, or all layers of a block."""


def groups(lines: Iterable[Line], what: str, keys: Sequence[Any]) -> dict[Any, list[Line]]:
    """Lines of a kind that count, by some of their fields; of each group those of the last run that has any."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        if line["what"] == what and line.get("note") in (None, "steady") and not line.get("error"):
            key = tuple(key(line) if callable(key) else line[key] for key in keys)
            found.setdefault(key, []).append(line)
    return {key: [one for one in some if one["run"] == some[-1]["run"]] for key, some in found.items()}


def memory_of(line: Line) -> str:
    """How the memory of both engines is laid out."""
    return BY_BLOCK if line.get("joined") else BY_LAYER


def median_of(lines: Sequence[Line], name: str) -> float | None:
    """The median of a field where it is there, None where it is nowhere."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return median(values) if values else None


def devices_of(line: Line) -> str:
    """Which devices: one, or two."""
    devices = {device for side in line.get("gpus", ()) for device in side.split(",")}
    return f"{len(devices)} GPU" + ("s" if len(devices) > 1 else "")


def sizes_of(line: Line) -> str:
    """Workers of the prefiller and of the decoder."""
    return "{} → {}".format(*line["tp"])
