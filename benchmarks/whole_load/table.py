"""Results as tables: medians of what each part of a load took, and what that is of a plain copy.

python3 -m benchmarks.whole_load.table load.jsonl [--page docs/gpu.md] writes those of the newer code into the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.markdown import table as drawn

HOST = ("wake", "plan", "hand_over", "post")
COLUMNS = (
    *("code", "backend", "memory", "block", "options", "busy", "MiB"),
    *("wake", "plan", "hand", "post", "moving", "device", "report", "whole us"),
    *("GB/s", "device GB/s", "of plain", "host part"),
)

PAGE = "whole loads"
"""The table of docs/gpu.md."""


def table(lines: Iterable[str]) -> str:
    """Markdown of all results."""
    found = [json.loads(line) for line in lines]
    runs: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for one in found:
        if "runs" in one:
            runs.setdefault((one["part"], *_key(one)), []).extend(one["runs"])
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for (part, *key), times in runs.items():
        if part == "load":
            rows.append(_load(key, times, runs))
    return "\n".join([*rows, "", *_plain(runs), *_staged(found), *_opened(found)])


def page_table(lines: Iterable[str]) -> str:
    """What docs/gpu.md shows: the loads of the code of now."""
    runs: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for one in map(json.loads, lines):
        if one["part"] in ("load", "plain") and one["code"] == "now":
            key = (one["part"], one["where"], *_key(one)[1:])
            runs.setdefault(key, []).extend(one["runs"])
    rows = []
    for (part, where, kind, memory, block, options, busy, size), times in runs.items():
        if part != "load":
            continue
        us = {name: median(one[name] for one in times) for name in times[0]}
        plain = _all(runs, "plain", size) if kind == "direct" else []
        rows.append(
            (
                _devices(where),
                kind,
                memory,
                block,
                "" if options == "{}" else f"`{options}`",
                "busy" if busy else "",
                f"{size:g} MiB",
                *(
                    f"{us[name] / 1e3:.2f} ms" if us[name] else ""
                    for name in ("plan", "post", "device", "whole")
                ),
                f"{size * (1 << 20) / us['whole'] / 1e3:.0f}",
                f"{median(one['whole'] for one in plain) / us['whole']:.2f}" if plain else "",
            )
        )
    head = ("where", "backend", "memory", "block", "options", "Python", "bytes")
    return drawn((*head, "planning", "posting", "kernel", "whole", "GB/s", "of a plain copy"), rows)


def _devices(where: str) -> str:
    """As the page's other tables write it."""
    count = where.rpartition(", ")[2]
    return {"1": "1 GPU", "2": "2 GPUs"}.get(count, where)


def _key(one: dict[str, Any]) -> tuple[Any, ...]:
    options = json.dumps(one.get("options", {}), sort_keys=True)
    way = (one.get("kind", ""), one.get("memory", ""), one.get("block", 0))
    return (one["code"], *way, options, bool(one.get("busy")), one["size"])


def _load(
    key: list[Any], times: list[dict[str, float]], runs: dict[tuple[Any, ...], list[dict[str, float]]]
) -> str:
    code, kind, memory, block, options, busy, size = key
    parts = {name: median(one[name] for one in times) for name in times[0]}
    nbytes, whole = size * (1 << 20), parts["whole"]
    plain = _all(runs, "plain", size)
    ratio = f"{median(one['whole'] for one in plain) / whole:.2f}" if plain and kind == "direct" else ""
    host = sum(parts[name] for name in HOST) / whole
    cells = [parts[name] for name in (*HOST, "moving", "device", "report", "whole")]
    device = f"{nbytes / parts['device'] / 1e3:.0f}" if parts["device"] else ""
    shown = [
        code,
        kind,
        memory,
        block,
        "" if options == "{}" else options,
        "yes" if busy else "",
        f"{size:g}",
    ]
    shown += [*(f"{cell:.0f}" for cell in cells), f"{nbytes / whole / 1e3:.1f}", device, ratio, f"{host:.0%}"]
    return "| " + " | ".join(map(str, shown)) + " |"


def _all(
    runs: dict[tuple[Any, ...], list[dict[str, float]]], part: str, size: float
) -> list[dict[str, float]]:
    return [one for key, found in runs.items() if key[0] == part and key[-1] == size for one in found]


def _plain(runs: dict[tuple[Any, ...], list[dict[str, float]]]) -> Iterator[str]:
    for size in sorted({key[-1] for key in runs}):
        for part, names in (("plain", ("whole", "device")), ("through_host", ("out", "back"))):
            times = _all(runs, part, size)
            middles = {name: median(one[name] for one in times) for name in names} if times else {}
            shown = [f"{name} {us:.0f} us ({_rate(size, us * 1e-6)})" for name, us in middles.items()]
            if shown:
                yield f"{part} {size:g} MiB: {', '.join(shown)}"


def _staged(found: list[dict[str, Any]]) -> Iterator[str]:
    times: dict[tuple[Any, ...], list[float]] = {}
    for one in found:
        if one.get("staged_s"):
            key = (one["code"], one["memory"], json.dumps(one["options"]), one["size"])
            times.setdefault(key, []).append(one["staged_s"])
    for (code, memory, options, size), seconds in times.items():
        middle = median(seconds)
        yield f"staging {code} by {memory} {options} {size:g} MiB: {middle * 1e3:.1f} ms ({_rate(size, middle)})"


def _opened(found: list[dict[str, Any]]) -> Iterator[str]:
    for one in found:
        if one["part"] == "open" and "connect_s" in one:
            took = ", ".join(
                f"{name[:-2]} {one[name]:.3f}" for name in ("register_s", "connect_s", "ready_s")
            )
            mapped = ", mapped" if one.get("mapped") else ""
            yield f"open {one['code']} {one['name']} {json.dumps(one['options'])}: {took} s{mapped}"
    checks = [one for one in found if one["part"] == "check"]
    yield f"{len(checks)} shapes compared, {sum(1 for one in checks if one['wrong'])} with wrong bytes"
    for one in found:
        if "error" in one:
            last = one["error"].strip().splitlines()[-1][:300]
            yield f"FAILED {one.get('code', '')} {one.get('name', one['part'])}: {last}"


def _rate(mib: float, seconds: float) -> str:
    return f"{mib * (1 << 20) / seconds / 1e9:.1f} GB/s"


def main() -> None:
    """Write it."""
    from benchmarks.gpu.tables import put  # more than the machine that measured needs to have

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, default=Path(__file__).resolve().parents[2] / "docs" / "gpu.md")
    given = parser.parse_args()
    page = given.page.read_text(encoding="utf-8")
    shown = page_table(given.results.read_text(encoding="utf-8").splitlines())
    given.page.write_text(put(page, PAGE, shown), encoding="utf-8")


if __name__ == "__main__":
    main()
