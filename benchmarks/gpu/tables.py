"""Writes the tables of docs/gpu.md from results, each between its two markers: no figure is put there by hand.

    python3 -m benchmarks.gpu.tables DIR [DIR ...] [--page docs/gpu.md | --show TABLE,...]

Where several runs measured the same, the last one counts. A table nothing was measured for says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import poisoned_tables
from benchmarks.gpu.fleet import ROOT
from benchmarks.gpu.markdown import ms, ratio, size, table
from benchmarks.gpu.report import read

Line = dict[str, Any]
WAYS = ("direct", "nixl", "mooncake", "stock-nixl", "stock-mooncake", "none")
BY_LAYER, BY_BLOCK = "by layer", "by block"
"""Whether each layer has its memory, as stock connectors have it unless told otherwise, or all layers of a block."""
STOCK_OF = {"direct": "stock-nixl", "nixl": "stock-nixl", "mooncake": "stock-mooncake"}
"""What each of ours is held against: direct has no peer of its kind, the faster common one stands in."""


def main() -> int:
    """Replace what stands between the markers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument(
        "--show", type=lambda text: text.split(","), default=[], help="print these and write nothing"
    )
    options = parser.parse_args()
    lines = read(options.folders)
    if options.show:
        sys.stdout.write("\n".join(f"{name}\n{TABLES[name](lines)}" for name in options.show))
        return 0
    page = options.page.read_text(encoding="utf-8")
    for name, draw in TABLES.items():
        page = put(page, name, draw(lines))
    options.page.write_text(page, encoding="utf-8")
    return 0


def put(page: str, name: str, text: str) -> str:
    """The page with ``text`` between the markers of ``name``. Raises `ValueError` where it has none."""
    begin, end = f"<!-- gpu: {name} -->", f"<!-- end: {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no {begin} ... {end}")
    return pattern.sub(lambda _: f"{begin}\n{text}{end}", page)


def machines(lines: Sequence[Line]) -> str:
    """What the runs were made on."""
    rows = [
        (
            ", ".join(sorted(set(line["names"]))) or line["device"],
            line["gpus"],
            line["cores"],
            ", ".join(f"{name} {version}" for name, version in line["versions"].items()),
        )
        for line in lines
        if line["what"] == "machine"
    ]
    return table(("device", "devices", "cores", "versions"), dict.fromkeys(rows))


def ceilings(lines: Sequence[Line]) -> str:
    """Plain copies and bare engines."""
    found = {(line["ceiling"], _where(line)): line for line in lines if line["what"] == "ceiling"}
    return table(
        ("what", "where", "bytes", "median", "GB/s", "first"),
        (
            (
                what,
                where,
                size(line["bytes"]),
                ms(line["seconds"]),
                f"{line['gb_per_s']:.0f}",
                ms(line["first"]),
            )
            for (what, where), line in found.items()
        ),
    )


def bytes_and_answers(lines: Sequence[Line]) -> str:
    """Whether the decoder's bytes are the prefiller's."""
    found = {
        (line["kind"], line["way"], line["mode"], _memory(line), _tp(line), line["tokens"]): line
        for line in lines
        if line["what"] == "correctness"
    }
    rows: dict[tuple[str, ...], list[Line]] = {}
    for (kind, way, mode, memory, tp, _), line in found.items():
        rows.setdefault((kind, way, mode, memory, tp, _where(line)), []).append(line)
    return table(
        (
            "model",
            "backend",
            "mode",
            "memory",
            "TP",
            "where",
            "prompts",
            "layers",
            "sums compared",
            "bytes",
            "answers",
        ),
        (
            (
                *key,
                ", ".join(str(one["tokens"]) for one in some),
                max(one.get("layers", 0) for one in some),
                sum(one.get("sums", 0) for one in some),
                _bytes_verdict(some),
                "; ".join(dict.fromkeys(_answer_verdict(one) for one in some)),
            )
            for key, some in rows.items()
        ),
    )


def transfers(lines: Sequence[Line]) -> str:
    """Transfer times beside the stock connectors' of the same run."""
    rows = []
    for (block, where, tokens, _), some in _transfers(lines):
        ways = _by_way(some)
        times = {key: _transfer_time(one) for key, one in ways.items()}
        moving = {key: _transfer_time(one, ("post", "wire")) for key, one in ways.items()}
        for key in _in_order(ways):
            (way, memory), one = key, ways[key]
            against = times.get((STOCK_OF.get(way, ""), BY_LAYER))
            rows.append(
                (
                    where,
                    block,
                    tokens,
                    way,
                    memory,
                    size(_first(one, "bytes") or _stock_first(one, "bytes_transferred")),
                    _first(one, "copies") or int(_stock_first(one, "num_descriptors") or 0),
                    ms(times[key]),
                    _share(one, times[key]),
                    ratio(times[key], against),
                    ratio(moving[key], against),
                )
            )
    return table(
        (
            "where", "block", "tokens", "way", "memory", "bytes", "copies", "transfer", "of which posting",
            "over stock", "without planning",
        ),
        rows,
    )  # fmt: skip


def first_tokens(lines: Sequence[Line]) -> str:
    """The decoder's first token: loaded, by stock, computed here; the first request against later ones."""
    rows = []
    for (block, where, tokens, _), some in _transfers(lines):
        ways = _by_way(some)
        times = {key: _median(one, "first_token") for key, one in ways.items()}
        for key in _in_order(ways):
            own = _median(ways[key], "local_first_token")
            rows.append(
                (
                    where,
                    block,
                    tokens,
                    *key,
                    ms(times[key]),
                    ratio(times[key], times.get((STOCK_OF.get(key[0], ""), BY_LAYER))),
                    ms(own),
                    ratio(times[key], own),
                )
            )
    return table(
        (
            "where", "block", "tokens", "way", "memory", "first token", "over stock", "computed here",
            "over that",
        ),
        rows,
    )  # fmt: skip


def first_requests(lines: Sequence[Line]) -> str:
    """The first hand-over between two engines against later ones of its length, where most pairs had one; medians."""
    some = [line for line in lines if line["what"] == "transfer" and not line["error"]]
    same = ("run", "stage", "way", "joined", "block", "tokens", "mode", "gpus")
    by: dict[tuple[str, ...], tuple[list[Line], list[Line]]] = {}
    for line in some:
        if line["note"] in ("first", "steady", "later"):
            key = tuple(str(line.get(name)) for name in same)
            by.setdefault(key, ([], []))[line["note"] != "first"].append(line)
    best: dict[tuple[Any, ...], tuple[list[Line], list[Line]]] = {}
    for first, later in by.values():
        if first and later:
            which = (_where(first[0]), first[0]["block"], first[0]["way"], _memory(first[0]))
            if len(first) >= len(best.get(which, ([], []))[0]):
                best[which] = (first, later)
    rows = []
    for which, (first, later) in best.items():
        one, steady = _median(first, "first_token"), _median(later, "first_token")
        rows.append(
            (*which, len(first), ms(one), ms(steady), ratio(one, steady), ms(_beyond(first)), ms(_beyond(later)),
             ms(_transfer_time(first)), ms(_transfer_time(later)))
        )  # fmt: skip
    return table(
        (
            "where", "block", "way", "memory", "pairs", "first request", "later ones", "ratio",
            "beyond computing it", "later ones", "first transfer", "later ones",
        ),
        rows,
    )  # fmt: skip


def overlaps(lines: Sequence[Line]) -> str:
    """What of a push hides behind the prefill."""
    rows = []
    for (block, where, way, mode), some in _groups(
        lines, "overlap", ("block", _where, "way", "mode")
    ).items():
        part = _median(some, "part_before_end")
        rows.append(
            (
                where,
                block,
                way,
                mode,
                some[0]["tokens"],
                ms(_median(some, "prefill")),
                "" if part is None else f"{100 * part:.1f} %",
                ms(_median(some, "end_to_reported")),
                ms(_median(some, "answer_to_reported")),
            )
        )
    return table(
        (
            "where", "block", "backend", "mode", "tokens", "prefill", "gone before its end",
            "its end to the load's", "prefiller's answer to the load's end",
        ),
        rows,
    )  # fmt: skip


def faults(lines: Sequence[Line]) -> str:
    """What became of loads that failed."""
    found = {(line["kind"], line["way"], line["fault"]): line for line in lines if line["what"] == "fault"}
    return table(
        ("model", "backend", "what happened", "the load", "engine", "answer", "took", "cause"),
        (
            (
                *key,
                line.get("state", ""),
                "alive" if line["alive"] else "DEAD",
                "right" if line["right"] else f"differs at token {line['first_difference']}",
                ms(line["took"]),
                str(line.get("cause", ""))[:120].replace("|", "/"),
            )
            for key, line in found.items()
        ),
    )


def step_times(lines: Sequence[Line]) -> str:
    """Steps without a connector, idle, busy."""
    rows = []
    for (where, eager), some in _groups(lines, "decode steps", (_where, "eager")).items():
        by = _groups(some, "decode steps", ("way", "mode", "busy"))
        base = next(
            (_median(one, "step") for (way, _, busy), one in by.items() if way == "none" and not busy), None
        )
        rows += [
            (
                where,
                "eager" if eager else "graphs",
                way,
                "" if way == "none" else mode,
                "busy" if busy else "idle",
                ms(_median(one, "step")),
                ratio(_median(one, "step"), base),
            )
            for (way, mode, busy), one in by.items()
        ]
    return table(("where", "steps", "connector", "mode", "", "a decode step", "over none"), rows)


def prefills(lines: Sequence[Line]) -> str:
    """Prefills without a connector, with one, and pushed."""
    rows = []
    for (where, eager), some in _groups(lines, "prefill", (_where, "eager")).items():
        by = _groups(some, "prefill", ("way", "mode"))
        base = next((_median(one, "alone") for (way, _), one in by.items() if way == "none"), None)
        for (way, mode), one in by.items():
            for name in ("alone", "pushed"):
                value = _median(one, name)
                if value is not None:
                    rows.append(
                        (
                            where,
                            "eager" if eager else "graphs",
                            way,
                            mode,
                            name,
                            ms(value),
                            ratio(value, base),
                        )
                    )
    return table(("where", "steps", "connector", "mode", "", "prefill", "over none"), rows)


def failed(lines: Sequence[Line]) -> str:
    """Stages of which something did not go through, in the last run that began them; smoke is a part of dense."""
    last = {line["stage"]: line for line in lines if line["what"] == "stage" and line["stage"] != "smoke"}
    rows = []
    for stage, line in last.items():
        lacking = [
            f"{one['pair']} did not start"
            for one in lines
            if one["what"] == "not started" and (one["stage"], one["run"]) == (stage, line["run"])
        ]
        if what := line["error"] or "; ".join(lacking):
            rows.append((stage, what[:300].replace("|", "/").replace("\n", " ")))
    return table(("stage", "what"), rows, "Everything that was begun went through.\n")


TABLES: dict[str, Callable[[Sequence[Line]], str]] = {
    "machines": machines,
    "ceilings": ceilings,
    "bytes": bytes_and_answers,
    "poisoned": poisoned_tables.poisoned,
    "parted": poisoned_tables.parted,
    "alone": poisoned_tables.alone,
    "transfers": transfers,
    "first tokens": first_tokens,
    "first requests": first_requests,
    "overlap": overlaps,
    "faults": faults,
    "steps": step_times,
    "prefills": prefills,
    "failed": failed,
}


def _transfers(lines: Sequence[Line]) -> Iterable[tuple[tuple[Any, ...], list[Line]]]:
    """Transfers by block, devices and tokens, apart for runs in which layers could be joined."""
    joined = {line["run"] for line in lines if line.get("joined")}
    return _groups(lines, "transfer", ("block", _where, "tokens", lambda line: line["run"] in joined)).items()


def _groups(lines: Iterable[Line], what: str, keys: Sequence[Any]) -> dict[Any, list[Line]]:
    """Lines of a kind that count, by some of their fields; of each group those of the last run that has any."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        if line["what"] == what and line.get("note") in (None, "steady") and not line.get("error"):
            key = tuple(key(line) if callable(key) else line[key] for key in keys)
            found.setdefault(key, []).append(line)
    return {key: [one for one in some if one["run"] == some[-1]["run"]] for key, some in found.items()}


def _by_way(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line["way"], _memory(line)), []).append(line)
    return found


def _in_order(ways: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(ways, key=lambda key: (WAYS.index(key[0]), key[1]))


def _memory(line: Line) -> str:
    return BY_BLOCK if line.get("joined") else BY_LAYER


def _transfer_time(lines: Sequence[Line], stages: Sequence[str] = ("plan", "post", "wire")) -> float | None:
    """Median seconds: of ours planning, posting and waiting; of stock what it counts itself, the last two."""
    ours = [sum(line["stages"].get(s, 0.0) for s in stages) for line in lines if "stages" in line]
    stock = [
        sum(line["stock"]["transfer_duration"])
        for line in lines
        if line.get("stock", {}).get("transfer_duration")
    ]
    return median(ours or stock) if ours or stock else None


def _beyond(lines: Sequence[Line]) -> float:
    """Median seconds to the first token beyond what the decoder took for such a prompt right after."""
    return float(median(line["first_token"] - line["local_first_token"] for line in lines))


def _share(lines: Sequence[Line], whole: float | None) -> str:
    posting = [line["stages"].get("post", 0.0) for line in lines if "stages" in line]
    posting += [
        sum(line["stock"]["post_duration"]) for line in lines if line.get("stock", {}).get("post_duration")
    ]
    return f"{100 * median(posting) / whole:.0f} %" if posting and whole else ""


def _median(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return median(values) if values else None


def _first(lines: Sequence[Line], name: str) -> Any:
    return next((line[name] for line in lines if line.get(name)), None)


def _stock_first(lines: Sequence[Line], name: str) -> Any:
    return next((sum(line["stock"][name]) for line in lines if line.get("stock", {}).get(name)), None)


def _where(line: Line) -> str:
    """Which devices: one, or two."""
    devices = {device for side in line.get("gpus", ()) for device in side.split(",")}
    return f"{len(devices)} GPU" + ("s" if len(devices) > 1 else "")


def _tp(line: Line) -> str:
    return "{} → {}".format(*line["tp"])


def _bytes_verdict(lines: Sequence[Line]) -> str:
    wrong = [
        f"{one['tokens']}: {one.get('why') or one.get('different')}" for one in lines if not one["equal"]
    ]
    return "equal" if not wrong else "DIFFERENT " + "; ".join(wrong)[:200]


def _answer_verdict(line: Line) -> str:
    answers = line["answers"]
    if line["error"]:
        return str(line["error"])[:100].replace("|", "/")
    if answers["first_difference"] is None:
        return "equal"
    if "first_difference_in_pieces" in answers and answers["first_difference_in_pieces"] is None:
        return "equal, computed in the same pieces"
    if answers.get("equals_prefiller_in_pieces"):
        return "equal to the prefiller's, computed in the same pieces"
    return f"differs at {answers['first_difference']} of {answers['tokens']}"


if __name__ == "__main__":
    sys.exit(main())
