"""The tables of served requests: first tokens, tokens between, throughput, goodput; and what first tokens wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.gpu.fleet import JOINED, STOCK
from benchmarks.gpu.lines import Line, devices_of, groups, median_of, memory_of
from benchmarks.gpu.markdown import ratio, table
from kvctl.ledger.statistics import quantile

FIRST_TARGET, BETWEEN_TARGET = 0.25, 0.025
"""Goodput counts requests whose first token came so many seconds after the router sent them, and whose next ones came
this far apart on average."""
Key = tuple[str, str, str]


def at_decoder(line: Line) -> float:
    """Seconds from where the decoder could begin, its receipt or the prefiller's answer, to its first token."""
    begin = max(line["decode"]["got"], line.get("prefill", {}).get("answered") or 0.0)
    return float(line["decode"]["token"] - begin)


def serving(lines: Sequence[Line]) -> str:
    """One row for each cell and way; p50 are medians of the rounds', p99 are of all requests together."""
    rows = []
    for (where, kind, cell), some in _cells(lines):
        ways = _by_way(some)
        firsts = {key: _middle(one, at_decoder) for key, one in ways.items()}
        stock = [found for (way, *_), found in firsts.items() if way == "stock-nixl" and found is not None]
        for key, one in ways.items():
            right = _right(one)
            between = [gap for line in right for gap in line["between"]]
            rows.append(
                (
                    where,
                    kind,
                    cell,
                    *key,
                    len(one),
                    _pair(firsts[key], [at_decoder(line) for line in right]),
                    ratio(firsts[key], min(stock)) if stock else "",
                    _pair(_middle(one, _whole), [_whole(line) for line in right]),
                    _pair(quantile(between, 0.5), between),
                    *_rates(one),
                    _lost(one),
                )
            )
    return table(
        (
            "where", "model", "requests", "way", "mode", "memory", "number", "decoder's first token, p50 / p99 ms",
            "over stock", "from the router's send, p50 / p99 ms", "between tokens, p50 / p99 ms", "requests/s",
            "tokens/s", "goodput/s", "failed, recomputed",
        ),
        rows,
    )  # fmt: skip


def split(lines: Sequence[Line]) -> str:
    """Medians in milliseconds of what lies between the router's send and the first token."""
    rows = []
    for (where, kind, cell), some in _cells(lines):
        for key, one in _by_way(some).items():
            times = [stages(line, key[1] == "push") for line in _right(one)] or [[None] * len(STAGES)]
            cells = [[at for at in column if at is not None] for column in zip(*times, strict=True)]
            rows.append((where, kind, cell, *key, *map(_median_ms, cells)))
    return table(("where", "model", "requests", "way", "mode", "memory", *STAGES), rows)


def bench_serve(lines: Sequence[Line]) -> str:
    """What `vllm bench serve` says, medians of the rounds."""
    found = groups(
        lines, "bench serve", (devices_of, "tokens", "rate", "router", "way", "mode", _memory_asked)
    )
    return table(
        (
            "where", "tokens", "requests/s asked", "router", "way", "mode", "memory asked for", "TTFT, p50 / p99 ms",
            "ITL, p50 / p99 ms", "requests/s", "tokens/s", "goodput/s", "failed",
        ),
        (
            (
                where, tokens, f"{rate:g}", router, way, mode, memory,
                *(
                    " / ".join(_ms((median_of(some, f"{part}_{name}_ms") or 0.0) / 1e3) for part in ("median", "p99"))
                    for name in ("ttft", "itl")
                ),
                *(
                    f"{median_of(some, name) or 0.0:.1f}"
                    for name in ("request_throughput", "output_throughput", "request_goodput")
                ),
                sum(one["failed"] for one in some) or "",
            )
            for (where, tokens, rate, router, way, mode, memory), some in found.items()
        ),
    )  # fmt: skip


def _memory_asked(line: Line) -> str:
    """What the connector asks vLLM for; of a server nobody looks whether it came."""
    pulls = line["way"] not in STOCK and line["mode"] == "pull"
    return memory_of({"joined": pulls or line["options"] == JOINED})


STAGES = (
    "to the prefiller",
    "waits there",
    "prefill",
    "to the decoder",
    "claim",
    "order",
    "device",
    "plan",
    "post",
    "bytes",
    "report",
    "to the step",
    "KV in all",
    "step",
    "answer",
)


def stages(line: Line, push: bool) -> list[float | None]:
    """Seconds of each of `STAGES`; of a push the decoder's part counts from the prefill's end."""
    prefill, decode = line.get("prefill") or {}, line["decode"]
    load = line.get("load") or {}
    moments = load.get("moments", {})
    # The worker received the order, and began to plan. Results from before both were noted have it all in the plan.
    received, planned = moments.get("received"), moments.get("planned")
    began = None if planned is None or received is None else planned - load["planning"]
    ready = prefill.get("first") if push else decode["queued"]

    def between(before: float | None, after: float | None) -> float | None:
        return None if before is None or after is None else after - before

    return [
        prefill.get("got", decode["got"]),
        between(prefill.get("got"), prefill.get("scheduled")),
        between(prefill.get("scheduled"), prefill.get("first")),
        None if push else between(prefill.get("first"), decode["queued"]),
        None if push else between(decode["queued"], moments.get("queued")),
        None if push else between(moments.get("queued"), received),
        None if push else between(received, began),
        None if push else between(moments.get("queued") if began is None else began, moments.get("posting")),
        None if push else between(moments.get("posting"), moments.get("posted")),
        between(ready if push else moments.get("posted"), moments.get("last")),
        between(moments.get("last"), moments.get("reported")),
        between(moments.get("reported"), decode["scheduled"]),
        between(ready, decode["scheduled"]),
        between(decode["scheduled"], decode["first"]),
        between(decode["first"], decode["token"]),
    ]


def _cells(lines: Iterable[Line]) -> list[tuple[tuple[str, str, str], list[Line]]]:
    """Requests that count, by where, model and cell, each of the last run that has any."""
    lines = list(lines)
    cut = _cut(lines)
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        if line["what"] == "served" and line.get("note") is None:
            found.setdefault((devices_of(line), line["kind"], line["cell"]), []).append(line)
    cells = []
    for key, some in found.items():
        last = [one for one in some if one["run"] == some[-1]["run"]]
        cells.append((key, [one for one in last if _turn(one) not in cut] or last))
    return cells


def _cut(lines: Iterable[Line]) -> set[tuple[Any, ...]]:
    """Of each stage of which rounds are over, but not the last, the cell that was the last: not all ways had a turn."""
    last: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    over: set[tuple[Any, ...]] = set()
    for line in lines:
        if line["what"] == "served" and line.get("note") is None:
            last[(line["run"], line.get("stage"))] = _turn(line)
        elif line["what"] == "round":
            over.add((line["run"], line.get("stage"), line["number"]))
    rounds = {one[:2] for one in over}
    return {turn for turn in last.values() if turn[:2] in rounds and (*turn[:2], turn[3]) not in over}


def _turn(line: Line) -> tuple[Any, ...]:
    return line["run"], line.get("stage"), line["cell"], line["round"]


def _by_way(lines: Iterable[Line]) -> dict[Key, list[Line]]:
    found: dict[Key, list[Line]] = {}
    for line in lines:
        mode = "" if line["way"] == "none" else line["mode"]
        found.setdefault((line["way"], mode, memory_of(line)), []).append(line)
    return dict(sorted(found.items()))


def _right(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if not line["error"] and "decode" in line]


def _whole(line: Line) -> float:
    return float(line["decode"]["token"])


def _middle(lines: Sequence[Line], value: Callable[[Line], float]) -> float | None:
    """The median of the rounds' medians."""
    rounds: dict[int, list[float]] = {}
    for line in _right(lines):
        rounds.setdefault(line["round"], []).append(value(line))
    return median(median(some) for some in rounds.values()) if rounds else None


def _rates(lines: Sequence[Line]) -> tuple[str, str, str]:
    """Requests, tokens and good requests a second, medians of the turns; of requests one at a time nothing.

    Each pair has a turn in each round, and others have theirs between these.
    """
    if not lines[0]["rate"]:
        return "", "", ""
    turns: dict[tuple[int, str], list[Line]] = {}
    for line in _right(lines):
        turns.setdefault((line["round"], line.get("pair", "")), []).append(line)
    found = []
    for some in turns.values():
        took = max(line["sent"] + line["decode"]["last"] for line in some) - min(
            line["sent"] for line in some
        )
        tokens = sum(1 + len(line["between"]) for line in some)
        found.append((len(some) / took, tokens / took, sum(map(_good, some)) / took))
    if not found:
        return "", "", ""
    requests, tokens_a_second, good = (median(one) for one in zip(*found, strict=True))
    return f"{requests:.1f}", f"{tokens_a_second:.0f}", f"{good:.1f}"


def _good(line: Line) -> bool:
    return _whole(line) <= FIRST_TARGET and mean(line["between"] or [0.0]) <= BETWEEN_TARGET


def _lost(lines: Sequence[Line]) -> str:
    failed = len(lines) - len(_right(lines))
    recomputed = sum(
        line["way"] != "none" and (line.get("load", {}).get("state") == "miss" or not line["cached"])
        for line in _right(lines)
    )
    return f"{failed}, {recomputed}" if failed or recomputed else ""


def _pair(middle: float | None, values: Sequence[float]) -> str:
    """The middle, and what all but one in a hundred of these do not exceed."""
    return f"{_ms(middle)} / {_ms(quantile(values, 0.99))}" if values and middle is not None else ""


def _median_ms(seconds: Sequence[float]) -> str:
    return _ms(median(seconds)) if seconds else ""


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
