"""W3C's traceparent: what is taken of a client's header, and what may stand on the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvd.vllm.request_trace import LONGEST_HEADER, sampled_parent
from kvd.wire.limits import TraceParent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
HOSTILE = {
    "empty": "",
    "of another version that is none": f"ff-{TRACE}-{SPAN}-01",
    "no trace": f"00-{'0' * 32}-{SPAN}-01",
    "no span": f"00-{TRACE}-{'0' * 16}-01",
    "in capitals": GOOD.upper(),
    "too short": GOOD[:-1],
    "too long": f"{GOOD}0",
    "with more in version 0": f"{GOOD}-x",
    "with a line of its own": f"{GOOD}\nx-other: 1",
    "with a line's end": f"{GOOD}\n",
    "in other digits": GOOD.replace("4", "\N{FULLWIDTH DIGIT FOUR}"),
    "with a zero byte": f"{GOOD[:-1]}\0",
    "huge": f"01-{TRACE}-{SPAN}-01-" + "a" * 1_000_000,
    "half a pair": f"{GOOD[:-1]}\ud800",
    "words": "'; DROP TABLE transfers; --",
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_traceparent_is_of_no_trace(header: str) -> None:
    assert sampled_parent({"traceparent": header}) == ""


@pytest.mark.parametrize(
    "headers", [None, {}, [], "traceparent", {"traceparent": None}, {"traceparent": b"x"}]
)
def test_headers_without_one_are_of_no_trace(headers: object) -> None:
    assert sampled_parent(headers) == ""


def test_a_trace_that_its_caller_does_not_sample_is_left_alone() -> None:
    assert sampled_parent({"traceparent": f"00-{TRACE}-{SPAN}-00"}) == ""
    assert sampled_parent({"traceparent": f"00-{TRACE}-{SPAN}-02"}) == ""


@pytest.mark.parametrize(
    "header", [GOOD, f" {GOOD}\t", f"00-{TRACE}-{SPAN}-03", f"cc-{TRACE}-{SPAN}-09-more"]
)
def test_a_good_one_travels_in_one_form(header: str) -> None:
    assert sampled_parent({"traceparent": header}) == GOOD


HEXADECIMAL = st.text("0123456789abcdef", min_size=1, max_size=34)
PARTS = st.lists(HEXADECIMAL | st.sampled_from(["00", "01", "ff", TRACE, SPAN, ""]), max_size=6)


@given(PARTS.map("-".join) | st.text(max_size=60))
def test_opentelemetry_reads_each_one_alike(header: str) -> None:
    context = get_current_span(
        TraceContextTextMapPropagator().extract({"traceparent": header})
    ).get_span_context()
    if context.is_valid and context.trace_flags.sampled and len(header) <= LONGEST_HEADER:
        expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    else:
        expected = ""
    assert sampled_parent({"traceparent": header}) == expected


@pytest.mark.parametrize("text", [*HOSTILE.values(), GOOD[:-1] + "0", "\n"])
def test_the_wire_takes_none_but_that_form(text: str) -> None:
    for good in ("", GOOD):
        assert msgspec.convert(good, TraceParent) == good
    if text:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, TraceParent)
