"""What a source tells is checked before anything is done with it, and little of it reaches the log."""

from __future__ import annotations

from collections import Counter

import pytest

from kvd.service.membership.told import (
    MOST_LINES,
    Lines,
    ToldHost,
    Untold,
    another_key,
    place,
    refused,
)
from kvd.shown import has_controls
from kvd.wire.identity import Endpoint

HERE = Endpoint("10.0.0.7", 9401)
LOOPBACK = Endpoint("127.0.0.1", 9401)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("10.0.0.8:9401", Endpoint("10.0.0.8", 9401)),
        ("node-8.fleet:1", Endpoint("node-8.fleet", 1)),
        ("[2001:DB8::1]:9401", Endpoint("2001:db8::1", 9401)),
    ],
)
def test_a_place_is_taken_as_it_is_written(text: str, wanted: Endpoint) -> None:
    assert place(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.8", "10.0.0.8:0", "10.0.0.8:99999", "a b:1", "\x1b[31mred:1", "x\u202e:1", "a" * 300 + ":1",
     "0.0.0.0:1", "[::]:1", "224.0.0.1:1", "http://a:1", "user@host:1"],
)  # fmt: skip
def test_what_is_no_place_of_a_kvd_is_refused_in_words_that_a_log_may_show(text: str) -> None:
    with pytest.raises(Untold) as untold:
        place(text)
    assert not has_controls(str(untold.value))
    assert len(str(untold.value)) < 200


@pytest.mark.parametrize(
    ("endpoint", "here", "expected", "wanted"),
    [
        (Endpoint("10.0.0.8", 1), HERE, "key", ""),
        (Endpoint("10.0.0.8", 1), HERE, "", ""),
        (Endpoint("127.0.0.1", 1), HERE, "key", "on loopback"),
        (Endpoint("127.0.0.2", 1), LOOPBACK, None, ""),
        (Endpoint("10.0.0.8", 1), LOOPBACK, None, "no keys"),
        (Endpoint("some.name", 1), LOOPBACK, None, "no keys"),
    ],
)
def test_without_keys_members_are_on_loopback_alone_and_with_a_network_never(
    endpoint: Endpoint, here: Endpoint, expected: str | None, wanted: str
) -> None:
    why = refused(endpoint, here, expected)
    assert wanted in why
    assert bool(why) == bool(wanted)


def told(*keys: str | None) -> list[ToldHost]:
    return [ToldHost(HERE, key) for key in keys]


def test_a_told_key_is_compared_and_never_taken() -> None:
    assert another_key(told("other"), "ours") == "other"
    assert another_key(told("ours"), "ours") is None
    assert another_key(told("other", "ours"), "ours") is None, "one entry that agrees is enough"
    assert another_key(told("other"), "") is None, "no key is trusted: discovery says so"
    assert another_key(told(None), "ours") is None, "DNS tells of no keys"
    assert another_key(told(""), "ours") == ""
    assert another_key(told("other"), None) == "other"
    assert another_key(told(""), None) is None


def test_each_thing_is_said_once_and_few_in_a_minute() -> None:
    said: list[str] = []
    counters: Counter[str] = Counter()
    lines = Lines(counters, said.append)
    for _ in range(3):
        lines.warn("value", "same\x1b[2J")
    assert said == [r"same\x1b[2J"]
    for number in range(1000):
        lines.warn("value", f"{number}")
    assert len(said) == MOST_LINES
    assert counters["membership.lines_dropped"] == 1001 - MOST_LINES
    lines.warn("many", "of another kind")
    assert said[-1] == "of another kind"
