"""The spans of a transfer, made of its moments: when each child begins and ends, and what the spans say."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.geometry.rank import Rank
from kvd.service.engines.lease_entry import LeaseEntry
from kvd.service.tracing.spans import TransferSpan, of_lease, of_load, of_push
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushKey, PushProgress, SentPart
from kvd.wire.transfer import TransferRecord
from tests.support.ledgers import record

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def load(**fields: Any) -> TransferRecord:
    names = {name: getattr(record(1), name) for name in TransferRecord.__struct_fields__}
    return TransferRecord(**{**names, "started": 1000.0, "traceparent": PARENT, **fields})


def steps(span: TransferSpan, since: float = 1000.0) -> dict[str, tuple[float, float]]:
    return {name: (round(begin - since, 6), round(end - since, 6)) for name, begin, end in span.children}


def test_a_pull_has_a_child_for_each_of_its_stages() -> None:
    moments = {
        "queued": -0.5, "handshake": 0.1, "planned": 0.2, "posting": 0.25, "posted": 0.3, "first": 0.4,
        "last": 0.5, "reported": 0.6,
    }  # fmt: skip
    span = of_load(load(moments=moments, tokens=300))
    assert (span.parent, span.side, span.begin, span.end) == (PARENT, "decoder", 999.5, 1000.6)
    assert steps(span) == {
        "queued": (-0.5, 0.0),
        "handshake": (0.0, 0.1),
        "plan": (0.1, 0.2),
        "post": (0.25, 0.3),
        "wire": (0.3, 0.5),
        "report": (0.5, 0.6),
    }
    assert span.error == ""
    told = {
        "kv_transfer.engine": "d",
        "kv_transfer.peer_engine": "p",
        "kv_transfer.mode": "pull",
        "kv_transfer.bytes": 10,
        "kv_transfer.tokens": 300,
    }
    assert told.items() <= span.attributes.items()


def test_a_load_beside_its_claim_has_a_child_for_the_wait() -> None:
    span = of_load(
        load(moments={"posting": 0.1, "posted": 0.2, "last": 0.3, "answered": 0.7, "reported": 0.8})
    )
    assert steps(span)["claim"] == (0.3, 0.7)


def test_a_push_has_its_own_children() -> None:
    moments = {"queued": -0.1, "announced": 0.1, "taken": 0.2, "first": 1.0, "last": 2.0, "reported": 2.1}
    span = of_load(load(mode="push", moments=moments))
    assert steps(span) == {
        "queued": (-0.1, 0.0),
        "announce": (0.1, 0.2),
        "wait": (0.2, 1.0),
        "wire": (1.0, 2.0),
        "report": (2.0, 2.1),
    }


def test_a_miss_is_an_error_with_the_steps_that_happened() -> None:
    missed = load(
        state="miss", code="TOO_LATE", cause="it took 20 s", moments={"queued": -0.1, "reported": 20.0}
    )
    span = of_load(missed)
    assert span.error == "TOO_LATE: it took 20 s"
    assert span.attributes["kv_transfer.miss_code"] == "TOO_LATE"
    assert steps(span) == {"queued": (-0.1, 0.0)}
    assert span.end - span.begin == pytest.approx(20.1)


def test_a_record_without_moments_is_a_span_without_children_that_takes_no_time() -> None:
    span = of_load(load(moments={}))
    assert (span.begin, span.end, steps(span)) == (1000.0, 1000.0, {})


class Owner:
    class engine:  # noqa: N801 - as a client of the registry has it
        engine_id = "p"


def lease(claimed: float) -> LeaseEntry:
    return LeaseEntry(Owner(), "r", 3, 10.0, 40.0, 40.0, 1, traceparent=PARENT, claimed=claimed)  # type: ignore[arg-type]


def test_what_a_prefiller_kept_is_unclaimed_and_then_read() -> None:
    span = of_lease(lease(10.5), "released", now=12.0, wall=1002.0)
    assert (span.side, span.begin, span.end) == ("prefiller", 1000.0, 1002.0)
    assert steps(span) == {"unclaimed": (0.0, 0.5), "read": (0.5, 2.0)}
    assert span.attributes["kv_transfer.lease_end"] == "released"


def test_what_nobody_claimed_was_not_read() -> None:
    assert steps(of_lease(lease(0.0), "expired", now=40.0, wall=1030.0)) == {"unclaimed": (0.0, 30.0)}


def progress(**fields: Any) -> PushProgress:
    key = PushKey(
        transfer_id="t", prefiller="p", prefiller_endpoint=Endpoint(), decoder="d", rank=Rank(1), attempt=1
    )
    return PushProgress(key=key, source=Rank(0), **fields)


def test_what_a_prefiller_pushed_waited_and_was_sent() -> None:
    moments = {"first": 0.5, "last": 2.0, "ended": 2.1}
    sent = SentPart(traceparent=PARENT, request_id="r", started=1000.0, moments=moments)
    span = of_push(progress(), sent)
    assert (span.parent, span.side, span.begin, span.end) == (PARENT, "prefiller", 1000.0, 1002.1)
    assert steps(span) == {"wait": (0.0, 0.5), "wire": (0.5, 2.0)}
    told = {
        "kv_transfer.engine": "p",
        "kv_transfer.peer_engine": "d",
        "kv_transfer.rank": "tp0",
        "kv_transfer.peer_rank": "tp1",
        "kv_transfer.attempts": 2,
    }
    assert told.items() <= span.attributes.items()


def test_a_push_that_failed_is_an_error() -> None:
    sent = SentPart(traceparent=PARENT, request_id="r", started=1000.0, moments={"ended": 2.1})
    span = of_push(progress(failed="the peer is away", code="PEER_AWAY"), sent)
    assert (span.error, span.children) == ("PEER_AWAY: the peer is away", ())
