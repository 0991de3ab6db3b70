"""Prefixes that were given and taken, by engine."""

from __future__ import annotations

import msgspec
import pytest

from kvd.service.metrics import render
from kvd.service.prefixes import counts as module
from kvd.service.prefixes.counts import OTHERS, PrefixCounts
from kvd.wire.identity import HERE
from kvd.wire.prefixes.cache import PrefixesGiven, PrefixesTaken
from kvd.wire.query import KvdStatus
from kvd.wire.transfer import TransferRecord

DONE = TransferRecord(
    transfer_id="t",
    request_id="r",
    local_engine="d",
    local_rank="tp0",
    remote_engine="p",
    remote_generation="g",
    remote_request_id="prefix-x",
    backend="direct",
    mode="pull",
    state="done",
    tokens=512,
    bytes=1000,
    prefix=True,
)
LOST = msgspec.structs.replace(DONE, state="miss", code="PREFIX_LOST")


def test_what_was_taken_is_counted_by_its_source() -> None:
    counts = PrefixCounts()
    counts.took(DONE, first=True)
    counts.took(msgspec.structs.replace(DONE, local_rank="tp1"), first=False)
    counts.took(LOST, first=True)
    counts.took(msgspec.structs.replace(LOST, code="DEADLINE"), first=True)
    counts.took(msgspec.structs.replace(DONE, remote_engine="q"), first=True)
    assert counts.taken("d") == (
        PrefixesTaken(source="p", reads=2, tokens=512, bytes=2000, lost=1),
        PrefixesTaken(source="q", reads=1, tokens=512, bytes=1000),
    )
    counts.forget("d")
    assert counts.taken("d") == ()


def test_what_was_given_is_counted() -> None:
    counts = PrefixCounts()
    for busy in (False, True):
        counts.answered("p", busy=busy)
    counts.read("p", 1000, kept=True)
    counts.read("p", 1000, kept=False)
    assert counts.given["p"] == PrefixesGiven(told=1, busy=1, kept=1, lost=1, bytes=1000)


def test_engines_beyond_the_most_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SOURCES", 1)
    counts = PrefixCounts()
    for name in ("p", "q", "r", "p"):
        counts.took(msgspec.structs.replace(DONE, remote_engine=name), first=True)
    assert [(one.source, one.reads) for one in counts.taken("d")] == [("p", 2), (OTHERS, 2)]


def test_all_sources_of_a_user_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SOURCES_OF_UID", 2)
    counts = PrefixCounts()
    for engine, source, uid in (
        ("d", "p", 1000), ("d", "q", 1000), ("e", "p", 1000), ("d", "p", 1000), ("f", "p", 1001),
    ):  # fmt: skip
        counts.took(
            msgspec.structs.replace(DONE, local_engine=engine, remote_engine=source, uid=uid), first=True
        )
    assert [(engine, one.source, one.reads) for engine, one in counts.all_taken()] == [
        ("d", "p", 2), ("d", "q", 1), ("e", OTHERS, 1), ("f", "p", 1),
    ]  # fmt: skip
    counts.forget("d")
    counts.took(msgspec.structs.replace(DONE, local_engine="e", uid=1000), first=True)
    assert [one.source for one in counts.taken("e")] == [OTHERS, "p"]


def test_metrics_name_both_engines() -> None:
    counts = PrefixCounts()
    counts.took(DONE, first=True)
    counts.took(LOST, first=True)
    status = KvdStatus(
        kvd_id="k",
        generation="g",
        version="1",
        pid=1,
        host="h",
        started=0.0,
        runtime_dir="/",
        endpoint=HERE,
        counters={},
        gauges={},
        peers=(),
    )
    lines = render(status, prefixes=counts.all_taken()).splitlines()
    assert [line for line in lines if line.startswith("kvd_prefix_")] == [
        'kvd_prefix_reads_total{engine="d",source="p",result="used"} 1',
        'kvd_prefix_reads_total{engine="d",source="p",result="lost"} 1',
        'kvd_prefix_read_tokens_total{engine="d",source="p"} 512',
        'kvd_prefix_read_bytes_total{engine="d",source="p"} 1000',
    ]
