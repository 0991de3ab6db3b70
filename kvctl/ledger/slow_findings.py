"""What is worth doing about transfers that take long: codes, messages, hints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.cli.numbers import rate, size, span
from kvctl.ledger.slow_pairs import PairKey, SlowPair
from kvctl.ledger.statistics import posted, quantile, took
from kvd.wire.transfer import OTHER, TransferRecord

LARGE = 0.4
"""Part of a transfer's time from which a stage is worth a word."""
MANY = 256
"""Copies of one transfer from which their number may be what takes the time."""
SMALL_COPY = 64 << 10
"""Bytes. Copies that are larger move at full rate, however many there are."""
BULK = 8 << 20
"""Bytes of a transfer from which its rate says something of the path."""
SLOW_PATH = 4.0
"""How many times slower than the fastest pair of the same backend a pair is before it is told."""
RARE = 0.01
"""Part of all transfers up to which misses and retries are nothing to report."""
STRAGGLER = 2.0
"""How many times longer than the fastest rank of its engine one takes before it is told."""
FEW = 10
"""Transfers of a rank that say nothing yet."""
LONG_POST = 0.1
"""Seconds from which a post of few copies is long."""
CRAWL = 100e6
"""Bytes a second. A backend that copies while it posts is faster, so below it does not copy but wait."""
TAIL, TAIL_SECONDS = 10.0, 0.5
"""How many times the middle one's time the slowest hundredth takes before it is told, and seconds at least."""
NOTABLE = 0.001
"""Seconds. A transfer that takes less is not worth a word, wherever its time goes."""


SlowSeverity = Literal["warning", "info"]


class SlowFinding(Struct, frozen=True, kw_only=True):
    """One thing worth doing."""

    code: Annotated[str, Meta(description="stable")]
    severity: SlowSeverity
    pair: Annotated[str, Meta(description="which transfers: remote to local, backend")]
    message: str
    hint: str


def find(
    pairs: Sequence[SlowPair], records: Mapping[PairKey, Sequence[TransferRecord]]
) -> tuple[SlowFinding, ...]:
    """All findings, warnings first, in the order of the pairs."""
    found: list[SlowFinding] = []
    for pair in pairs:
        of = records[pair.remote_engine, pair.local_engine, pair.backend, pair.mode]
        held_up = [*_held_up(pair, of)]
        found += [f for f in _stages(pair) if not (held_up and f.code == "COPIES_WHILE_POSTING")]
        tail = () if held_up else _tail(pair, of)
        found += [*held_up, *tail, *_path(pair, pairs), *_failures(pair, of), *_ranks(pair, of)]
    return tuple(sorted(found, key=lambda f: f.severity == "info"))


def _stages(pair: SlowPair) -> Iterator[SlowFinding]:
    """What the dominant stages mean."""
    shares = {stage.stage: stage.share for stage in pair.stages}
    large = (
        {name for name, share in shares.items() if share >= LARGE} if pair.seconds_p50 >= NOTABLE else set()
    )
    many = pair.descriptors_p50 >= MANY and pair.bytes_per_descriptor <= SMALL_COPY
    copies = f"{pair.descriptors_p50} copies of {size(pair.bytes_per_descriptor)}"
    if "post" in large and many:
        yield _finding(
            "DESCRIPTOR_STORM", "warning", pair,
            f"posting takes {shares['post']:.0%} of the time, {copies} for the middle transfer",
            "larger blocks or one layout on both sides make fewer copies: kvctl describe-topology"
            f" {pair.local_engine} {pair.remote_engine}",
        )  # fmt: skip
    elif "post" in large:
        yield _finding(
            "COPIES_WHILE_POSTING", "info", pair,
            f"posting takes {shares['post']:.0%} of the time, with {copies} only: {pair.backend} copies while it posts",
            "nothing is wrong between workers on one host; between hosts see docs/backends/ for the transport in use",
        )  # fmt: skip
    elif "wire" in large and many and pair.mode == "pull":
        yield _finding(
            "DESCRIPTOR_STORM", "info", pair,
            f"the wire takes {shares['wire']:.0%} of the time, in {copies} for the middle transfer",
            "the number of copies may bound the rate: kvctl describe-topology"
            f" {pair.local_engine} {pair.remote_engine}",
        )  # fmt: skip
    if "handshake" in large:
        yield _finding(
            "HANDSHAKE_ON_PATH", "warning", pair,
            f"waiting for the handshake takes {shares['handshake']:.0%} of the time",
            "list the prefiller's kvd under peer.connect in kvd.yaml: engines are then known before the first request",
        )  # fmt: skip
    if "queued" in large:
        yield _finding(
            "QUEUE_WAIT", "warning", pair,
            f"loads wait {shares['queued']:.0%} of the time before a worker begins with them",
            "the worker's steps are long, or loads come faster than they are moved: look at its step times and at"
            f" kvctl transfers --engine {pair.local_engine} --by rank",
        )  # fmt: skip
    if "claim" in large:
        yield _finding(
            "CLAIM_WAIT", "warning", pair,
            f"loads that have come wait {shares['claim']:.0%} of the time for the answers on their claims",
            f"a kvd is busy or far: kvctl status on the hosts of {pair.local_engine} and {pair.remote_engine}",
        )  # fmt: skip
    if "plan" in large:
        yield _finding(
            "PLAN_COST", "warning", pair,
            f"computing what to copy takes {shares['plan']:.0%} of the time, {copies} for the middle transfer",
            f"larger blocks make less to compute: kvctl describe-topology {pair.local_engine} {pair.remote_engine}",
        )  # fmt: skip
    if OTHER in large:
        yield _finding(
            "BETWEEN_STAGES", "warning", pair,
            f"{shares[OTHER]:.0%} of the time passes between the stages: the worker does not get on, or lanes fail",
            "has this host a core to spare beside each of vLLM's processes? See \"on few cores\" in docs/connector.md;"
            " kvctl transfer shows one on an axis of time",
        )  # fmt: skip
    if "wait" in large:
        yield _finding(
            "WAITS_FOR_PREFILL", "info", pair,
            f"{shares['wait']:.0%} of the time passes before the first layer is there: the prefiller computes",
            "that is what a push looks like; if it is too long, the prefiller is busy or not sent the request at once",
        )  # fmt: skip


def _held_up(pair: SlowPair, records: Sequence[TransferRecord]) -> Iterator[SlowFinding]:
    """Posts that took long without moving anything: stages say nothing then but that the thread did not get on."""
    late = [
        r
        for r in records
        if r.coalesced_descriptors < MANY and r.stages.get("post", 0.0) >= max(LONG_POST, r.bytes / CRAWL)
    ]
    if len(late) > RARE * len(records):
        worst = max(late, key=lambda r: r.stages["post"])
        yield _finding(
            "HELD_UP", "warning", pair,
            f"{len(late)} of {len(records)} were held up while they were posted, {span(worst.stages['post'])} at worst"
            f" for {worst.coalesced_descriptors} copies, {size(worst.bytes)} in all",
            "has this host a core to spare beside each of vLLM's processes? See \"on few cores\" in docs/connector.md;"
            " else the transfer engine waits for its peer",
        )  # fmt: skip


def _tail(pair: SlowPair, records: Sequence[TransferRecord]) -> Iterator[SlowFinding]:
    """Pulls that take far longer than the middle one, and move no more bytes for it."""
    middle, worst = pair.seconds_p50, pair.seconds_p99
    if pair.mode == "push" or worst < max(TAIL_SECONDS, TAIL * middle):
        return
    size_p50 = quantile([r.bytes for r in records], 0.5)
    late = [
        r
        for r in records
        if r.state == "done" and took(r) > TAIL * middle and took(r) * size_p50 > TAIL / 2 * middle * r.bytes
    ]
    if not late:
        return
    names = dict.fromkeys(name for r in late for name in r.stages)
    stages = {name: sum(r.stages.get(name, 0.0) for r in late) for name in names}
    stage, seconds = max(stages.items(), key=lambda one: one[1])
    yield _finding(
        "LONG_TAIL", "warning", pair,
        f"one in a hundred takes {span(worst)} or more, the middle one {span(middle)}, of as many bytes;"
        f" {seconds / sum(stages.values()):.0%} of the time of {len(late)} such is in {stage}",
        f"kvctl transfers --engine {pair.local_engine} --peer {pair.remote_engine} --sort slowest lists them, kvctl"
        " transfer ID shows one on an axis of time",
    )  # fmt: skip


def _path(pair: SlowPair, pairs: Sequence[SlowPair]) -> Iterator[SlowFinding]:
    """A pair that moves bytes much slower than others do with the same backend."""
    if pair.bytes_per_second is None or pair.bytes < BULK * pair.transfers:
        return
    best = max(
        (
            p
            for p in pairs
            if p.backend == pair.backend and p.bytes_per_second and p.bytes >= BULK * p.transfers
        ),
        key=lambda p: p.bytes_per_second or 0.0,
    )
    if best.bytes_per_second and best.bytes_per_second > SLOW_PATH * pair.bytes_per_second:
        yield _finding(
            "SLOW_PATH", "warning", pair,
            f"{rate(pair.bytes_per_second)} where {best.remote_engine} to {best.local_engine} reaches"
            f" {rate(best.bytes_per_second)} with the same backend",
            "the backend may have fallen back to a slower transport in this direction: see its page in docs/backends/",
        )  # fmt: skip


def _failures(pair: SlowPair, records: Sequence[TransferRecord]) -> Iterator[SlowFinding]:
    """Misses and retries, with what most of them had in common."""
    if pair.misses > RARE * pair.transfers:
        missed = [r for r in records if r.state == "miss"]
        [(common, count)] = Counter(r.code or r.cause for r in missed).most_common(1)
        cause = next(r.cause for r in missed if (r.code or r.cause) == common)
        what = ": ".join(dict.fromkeys(filter(None, (common, cause))))  # a trace has no causes
        yield _finding(
            "MISSES", "warning", pair,
            f"{pair.misses} of {pair.transfers} were misses" + (f", {count} of them: {what[:200]}" if what else ""),
            f"kvctl transfers --state miss --engine {pair.local_engine} --by code",
        )  # fmt: skip
    if pair.retried > RARE * pair.transfers:
        yield _finding(
            "RETRIES", "warning", pair,
            f"{pair.retried} of {pair.transfers} took more than one attempt",
            "the log of the decoding engine says why a lane failed",
        )  # fmt: skip


def _ranks(pair: SlowPair, records: Sequence[TransferRecord]) -> Iterator[SlowFinding]:
    """A rank that makes all others wait."""
    times: dict[str, list[float]] = {}
    for r in records:
        if r.state == "done":
            times.setdefault(r.local_rank, []).append(posted(r))
    middle = {rank: quantile(values, 0.5) for rank, values in times.items() if len(values) >= FEW}
    if len(middle) < 2:
        return
    slowest, fastest = max(middle, key=lambda r: middle[r]), min(middle, key=lambda r: middle[r])
    if middle[slowest] > max(NOTABLE, STRAGGLER * middle[fastest]):
        yield _finding(
            "STRAGGLER", "warning", pair,
            f"{slowest} takes {span(middle[slowest])} to move its part, {fastest} {span(middle[fastest])}",
            f"kvctl describe-topology {pair.local_engine} {pair.remote_engine} says how bytes are spread; else look at"
            " that rank's card, NIC and NUMA node",
        )  # fmt: skip


def _finding(code: str, severity: SlowSeverity, pair: SlowPair, message: str, hint: str) -> SlowFinding:
    where = f"{pair.remote_engine} to {pair.local_engine}, {pair.backend}"
    return SlowFinding(code=code, severity=severity, pair=where, message=message, hint=hint)
