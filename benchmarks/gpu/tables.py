"""Writes the tables of docs/gpu.md from results, each between its two markers: no figure is put there by hand.

    python3 -m benchmarks.gpu.tables DIR [DIR ...] [--tables TABLE,...] [--page docs/gpu.md | --show]

Where several runs measured the same, the last one counts. A table nothing was measured for says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu import poisoned_tables, transfer_tables
from benchmarks.gpu.fleet import ROOT
from benchmarks.gpu.lines import Line, devices_of, groups, median_of, memory_of, sizes_of
from benchmarks.gpu.markdown import ms, ratio, size, table
from benchmarks.gpu.report import read
from benchmarks.serving import tables as serving_tables


def main() -> int:
    """Replace what stands between the markers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--tables", type=lambda text: text.split(","), default=[], help="these alone")
    parser.add_argument("--show", action="store_true", help="print them and write nothing")
    options = parser.parse_args()
    lines = read(options.folders)
    chosen = {name: TABLES[name] for name in options.tables or TABLES}
    if options.show:
        sys.stdout.write("\n".join(f"{name}\n{draw(lines)}" for name, draw in chosen.items()))
        return 0
    page = options.page.read_text(encoding="utf-8")
    for name, draw in chosen.items():
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
    found = {(line["ceiling"], devices_of(line)): line for line in lines if line["what"] == "ceiling"}
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
        (line["kind"], line["way"], line["mode"], memory_of(line), sizes_of(line), line["tokens"]): line
        for line in lines
        if line["what"] == "correctness"
    }
    rows: dict[tuple[str, ...], list[Line]] = {}
    for (kind, way, mode, memory, tp, _), line in found.items():
        rows.setdefault((kind, way, mode, memory, tp, devices_of(line)), []).append(line)
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


def overlaps(lines: Sequence[Line]) -> str:
    """What of a push hides behind the prefill."""
    rows = []
    for (block, where, way, mode), some in groups(
        lines, "overlap", ("block", devices_of, "way", "mode")
    ).items():
        part = median_of(some, "part_before_end")
        rows.append(
            (
                where,
                block,
                way,
                mode,
                some[0]["tokens"],
                ms(median_of(some, "prefill")),
                "" if part is None else f"{100 * part:.1f} %",
                ms(median_of(some, "end_to_reported")),
                ms(median_of(some, "answer_to_reported")),
            )
        )
    return table(
        (
            "where", "block", "backend", "mode", "tokens", "prefill", "gone before its end",
            "its end to the load's", "prefiller's answer to the load's end",
        ),
        rows,
    )  # fmt: skip


def besides(lines: Sequence[Line]) -> str:
    """Prefills of the same engine: alone, to be pulled, and pushed."""
    keys = (devices_of, "eager", "way", "tokens")
    return table(
        ("where", "steps", "backend", "tokens", "alone", "to be pulled", "pushed", "over alone", "gone before its end",
         "its end to the last byte", "prefiller's answer to the decoder's"),
        (
            (
                where, "eager" if eager else "graphs", way, tokens,
                *(ms(median_of(some, name)) for name in ("alone", "pulled", "pushed")),
                ratio(median_of(some, "pushed"), median_of(some, "alone")),
                "" if part is None else f"{100 * part:.1f} %",
                ms(median_of(watched, "end_to_last")),
                ms(median_of(some, "after_prefill")),
            )
            for (where, eager, way, tokens), some in groups(lines, "beside", keys).items()
            for watched in [groups(lines, "watched push", keys).get((where, eager, way, tokens), [])]
            for part in [median_of(watched, "part_before_end")]
        ),
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
    for (where, eager), some in groups(lines, "decode steps", (devices_of, "eager")).items():
        by = groups(some, "decode steps", ("way", "mode", "busy"))
        base = next(
            (median_of(one, "step") for (way, _, busy), one in by.items() if way == "none" and not busy), None
        )
        rows += [
            (
                where,
                "eager" if eager else "graphs",
                way,
                "" if way == "none" else mode,
                "busy" if busy else "idle",
                ms(median_of(one, "step")),
                ratio(median_of(one, "step"), base),
            )
            for (way, mode, busy), one in by.items()
        ]
    return table(("where", "steps", "connector", "mode", "", "a decode step", "over none"), rows)


def prefills(lines: Sequence[Line]) -> str:
    """Prefills without a connector, with one, and pushed."""
    rows = []
    for (where, eager), some in groups(lines, "prefill", (devices_of, "eager")).items():
        by = groups(some, "prefill", ("way", "mode"))
        base = next((median_of(one, "alone") for (way, _), one in by.items() if way == "none"), None)
        for (way, mode), one in by.items():
            for name in ("alone", "pushed"):
                value = median_of(one, name)
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
    "zeroing": poisoned_tables.zeroing,
    "parted": poisoned_tables.parted,
    "alone": poisoned_tables.alone,
    "transfers": transfer_tables.transfers,
    "first tokens": transfer_tables.first_tokens,
    "first requests": transfer_tables.first_requests,
    "checksums": transfer_tables.checksums,
    "prefixes": transfer_tables.prefixes,
    "overlap": overlaps,
    "beside": besides,
    "faults": faults,
    "steps": step_times,
    "prefills": prefills,
    "serving": serving_tables.serving,
    "serving-split": serving_tables.split,
    "bench-serve": serving_tables.bench_serve,
    "failed": failed,
}


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
