"""The tables of transfers: how long they take, and how long until the decoder's first token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.lines import BY_LAYER, Line, devices_of, groups, median_of, memory_of
from benchmarks.gpu.markdown import ms, ratio, size, table

WAYS = ("direct", "nixl", "mooncake", "stock-nixl", "stock-mooncake", "p2p", "none")
STOCK_OF = {"direct": "stock-nixl", "nixl": "stock-nixl", "mooncake": "stock-mooncake"}
"""What each of ours is held against: direct has no peer of its kind, the faster common one stands in."""


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
        times = {key: median_of(one, "first_token") for key, one in ways.items()}
        for key in _in_order(ways):
            own = median_of(ways[key], "local_first_token")
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


def checksums(lines: Sequence[Line]) -> str:
    """Loads whose KV is added up on both sides, beside loads whose KV is not."""
    some = [line for line in lines if line.get("options", {}).get("kv_checksum")]
    rows = []
    for (place, block, tokens, way), same in groups(
        some, "transfer", (devices_of, "block", "tokens", "way")
    ).items():
        by: dict[str, list[Line]] = {}
        for line in same:
            by.setdefault(str(line["options"]["kv_checksum"]), []).append(line)
        base = median_of(by.get("off", []), "first_token")
        for which, of_it in by.items():
            first = median_of(of_it, "first_token")
            misses = sum(line.get("state") == "miss" for line in of_it)
            rows.append(
                (place, block, tokens, way, which, size(_first(of_it, "bytes")), ms(_transfer_time(of_it)),
                 ms(first), ratio(first, base), ms(median_of(of_it, "prefill")), misses)
            )  # fmt: skip
    return table(
        (
            "where", "block", "tokens", "way", "added up", "bytes", "transfer", "first token", "over off",
            "prefill", "misses",
        ),
        rows,
    )  # fmt: skip


def prefixes(lines: Sequence[Line]) -> str:
    """First tokens of prompts that another engine holds, against computing them: medians of one run."""
    rows = []
    keys = (devices_of, "kind", "block", "tokens", "way", memory_of)
    found = groups(lines, "prefix", keys)
    for key in sorted(found, key=lambda one: (*one[:2], one[2] or 0, one[3], WAYS.index(one[4]))):
        where, kind, block, tokens, way, memory = key
        some = found[key]
        times = {
            name: median(line[name]["seconds"] for line in some)
            for name in ("computed", "read", "held there")
        }
        cached = sorted({line["read"]["cached"] for line in some})
        rows.append(
            (
                where,
                kind,
                block or "",
                tokens,
                way,
                memory,
                len(some),
                " to ".join(map(str, dict.fromkeys((cached[0], cached[-1])))),
                ms(times["computed"]),
                ms(times["read"]),
                ratio(times["read"], times["computed"]),
                ms(times["held there"]),
                f"{sum(line['equal'] for line in some)} of {len(some)}",
            )
        )
    return table(
        (
            "where", "model", "block", "tokens", "way", "memory", "prompts", "tokens read", "computed", "read",
            "over computed", "in its own cache", "answers equal",
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
            which = (devices_of(first[0]), first[0]["block"], first[0]["way"], memory_of(first[0]))
            if len(first) >= len(best.get(which, ([], []))[0]):
                best[which] = (first, later)
    rows = []
    for which, (first, later) in best.items():
        one, steady = median_of(first, "first_token"), median_of(later, "first_token")
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


def _transfers(lines: Sequence[Line]) -> Iterable[tuple[tuple[Any, ...], list[Line]]]:
    """Transfers by block, devices and tokens, apart for runs in which layers could be joined."""
    plain = [line for line in lines if "kv_checksum" not in line.get("options", {})]
    joined = {line["run"] for line in plain if line.get("joined")}
    return groups(
        plain, "transfer", ("block", devices_of, "tokens", lambda line: line["run"] in joined)
    ).items()


def _by_way(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line["way"], memory_of(line)), []).append(line)
    return found


def _in_order(ways: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(ways, key=lambda key: (WAYS.index(key[0]), key[1]))


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


def _first(lines: Sequence[Line], name: str) -> Any:
    return next((line[name] for line in lines if line.get(name)), None)


def _stock_first(lines: Sequence[Line], name: str) -> Any:
    return next((sum(line["stock"][name]) for line in lines if line.get("stock", {}).get(name)), None)
