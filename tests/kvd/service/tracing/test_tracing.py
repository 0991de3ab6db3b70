"""A kvd that tells a collector of transfers: what comes there, and what a collector that is ill costs."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.service.config import TracingSettings
from kvd.service.errors import ConfigError
from kvd.service.tracing import settings as tracing_settings
from kvd.service.tracing.tracing import Tracing
from kvd.wire.lease import LeaseOpened
from kvd.wire.order import EndLease
from kvd.wire.registration import OpenLease
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from tests.support.collectors import collector
from tests.support.daemons import Daemon, daemons, facts, reporter, scheduler, session, wait_for
from tests.support.ledgers import record
from tests.support.ports import free_port

QUEUE = 8


def parent() -> tuple[str, str, str]:
    """A traceparent and the two ids in it."""
    trace, span = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    return f"00-{trace}-{span}-01", trace, span


def traced(number: int, header: str, **fields: Any) -> TransferRecord:
    moments = {"queued": -0.1, "planned": 0.1, "posting": 0.1, "posted": 0.2, "last": 0.3, "reported": 0.4}
    told = {"started": time.time() - 1, "moments": moments, "traceparent": header, **fields}
    return msgspec.structs.replace(record(number), **told)


@contextlib.contextmanager
def telling(url: str) -> Iterator[Daemon]:
    """A kvd that tells a collector."""
    settings = {"endpoint": url, "queue": QUEUE, "timeout_seconds": 1.0}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"tracing": settings}, file)  # JSON is YAML
        file.flush()
        with daemons(1, "--config", file.name) as (daemon,):
            yield daemon


def count(daemon: Daemon, what: str) -> int:
    return daemon.status().counters.get(f"traced.{what}", 0)


def recorded(daemon: Daemon) -> int:
    answer = daemon.ask(ListTransfers())
    assert isinstance(answer, TransferList)
    return answer.total


def test_a_load_is_a_span_with_children_in_the_trace_of_its_request() -> None:
    header, trace, above = parent()
    with collector() as its, telling(its.url) as daemon, reporter(daemon) as report:
        report(traced(1, header), record(2))
        (span,) = wait_for(lambda: its.of(trace, "kv_transfer"))
        assert span.parent == above
        assert (span.attributes["kv_transfer.side"], span.attributes["kv_transfer.id"]) == ("decoder", "t1")
        assert span.resource["service.name"] == "kvd"
        assert span.resource["service.instance.id"] == daemon.status().kvd_id
        children = its.children(span)
        names = [child.name.removeprefix("kv_transfer.") for child in children]
        assert names == ["queued", "plan", "post", "wire", "report"]
        assert all(span.begin <= child.begin <= child.end <= span.end for child in children)
        wait_for(lambda: count(daemon, "exported") == 1)
        assert {one.trace for one in its.spans} == {trace}, "the other load belongs to none"


def test_a_record_that_is_sent_again_is_told_of_once() -> None:
    header, trace, _ = parent()
    later, other, _ = parent()
    with collector() as its, telling(its.url) as daemon, reporter(daemon) as report:
        report(traced(1, header))
        report(traced(1, header))
        report(traced(2, later))
        wait_for(lambda: its.of(other))
        assert len(its.of(trace, "kv_transfer")) == 1


@pytest.mark.parametrize("end", ["aborted", "owner_gone"])
def test_a_lease_is_the_prefillers_span(end: str) -> None:
    header, trace, above = parent()
    with collector() as its, telling(its.url) as daemon:
        with session(daemon, scheduler(facts("p"))) as owner:
            lease = OpenLease("r", 20.0, 3, 1, header)
            owner.call(LeaseOpened(engine_id="p", leases=(lease,)), 20.0).result(20)
            if end == "aborted":
                daemon.ask(EndLease(engine_id="p", request_id="r", carry_out=True))
        (span,) = wait_for(lambda: its.of(trace, "kv_transfer"))
        assert (span.parent, span.attributes["kv_transfer.side"]) == (above, "prefiller")
        assert (span.attributes["kv_transfer.blocks"], span.attributes["kv_transfer.lease_end"]) == (3, end)
        assert [child.name for child in its.children(span)] == ["kv_transfer.unclaimed"]


def test_a_traceparent_of_another_form_is_refused() -> None:
    good = parent()[0]
    with collector() as its, telling(its.url) as daemon, reporter(daemon) as report:
        for hostile in ("x" * 55, good.upper(), f"{good}\n", f"00-{'0' * 32}-{good[36:]}", good * 1000):
            with pytest.raises(RefusedByDaemon, match="traceparent"):
                report(traced(1, hostile))
        report(traced(1, good))
        assert recorded(daemon) == 1
        wait_for(lambda: its.spans)


def test_of_sampled_traces_that_part_is_told_of_that_is_asked_for() -> None:
    headers = [parent()[0] for _ in range(4000)]

    def told(sample: float) -> set[str]:
        tracing = Tracing(TracingSettings(sample=sample), Counter())
        return {header for header in headers if tracing.samples(header)}

    assert told(1.0) == set(headers)
    assert told(0.0) == set()
    assert 0.2 < len(told(0.25)) / len(headers) < 0.3
    assert told(0.25) < told(0.5), "every host decides alike"
    low = [f"00-{'0' * 24}{number:08x}-00f067aa0ba902b7-01" for number in range(1, 1000)]
    kept = [header for header in low if Tracing(TracingSettings(sample=0.5), Counter()).samples(header)]
    assert 400 < len(kept) < 600, "also where the caller sampled by the id"


def answers_at_once(daemon: Daemon, report: Any, first: int) -> None:
    """More transfers than may wait are all recorded, each as fast as ever."""
    for number in range(first, first + 4 * QUEUE):
        report(traced(number, parent()[0]), seconds=5.0)
    assert recorded(daemon) >= 4 * QUEUE


def test_a_collector_that_is_away_costs_nothing_and_is_told_again_when_it_is_there() -> None:
    port = free_port()
    with telling(f"http://127.0.0.1:{port}/v1/traces") as daemon, reporter(daemon) as report:
        answers_at_once(daemon, report, 0)
        wait_for(lambda: count(daemon, "failed") and count(daemon, "dropped"))
        assert count(daemon, "exported") == 0
        assert daemon.log.count("spans do not reach") == 1
        with collector(port) as its:
            wait_for(
                lambda: count(daemon, "failed") + count(daemon, "dropped") >= 4 * QUEUE or its.spans, 20.0
            )
            header, trace, _ = parent()
            report(traced(1000, header))
            wait_for(lambda: its.of(trace), 20.0)
            wait_for(lambda: "spans reach" in daemon.log)


@pytest.mark.parametrize("ill", ["silent", "refusing"])
def test_a_collector_that_is_ill_costs_nothing(ill: str) -> None:
    with collector() as its, telling(its.url) as daemon, reporter(daemon) as report:
        if ill == "silent":
            its.hold.clear()
        else:
            its.status = 503
        answers_at_once(daemon, report, 0)
        wait_for(lambda: count(daemon, "failed") and count(daemon, "dropped"), 20.0)
        began = time.monotonic()
        assert daemon.stop(20.0) == 0
        assert time.monotonic() - began < 10.0, "nor does it hold up kvd's end"


def test_what_waits_is_brought_away_when_kvd_ends() -> None:
    header, trace, _ = parent()
    with collector() as its, telling(its.url) as daemon:
        with reporter(daemon) as report:
            report(traced(1, header))
        assert daemon.stop(20.0) == 0
        assert its.of(trace)


def test_without_a_collector_nothing_is_told_and_nothing_imported() -> None:
    with daemons() as (daemon,), reporter(daemon) as report:
        report(traced(1, parent()[0]))
        assert not [name for name in daemon.status().counters if name.startswith("traced.")]
        with open(f"/proc/{daemon.pid}/maps") as maps:  # noqa: PTH123 - of the kernel's
            assert "opentelemetry" not in maps.read()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "ftp://a/v1/traces", "http://", "http://a", "http://a/", "http://a:x/v1/traces"]
)
def test_an_endpoint_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        tracing_settings.check(TracingSettings(endpoint=url))


def test_without_the_extra_kvd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_settings, "LIBRARY", "nowhere.exporter")
    tracing_settings.check(TracingSettings())
    with pytest.raises(ConfigError) as caught:
        tracing_settings.check(TracingSettings(endpoint="http://127.0.0.1:4318/v1/traces"))
    assert "kvctl[otel]" in caught.value.hint
