"""Kvds that do not answer: what is told of them, and what is believed."""

from __future__ import annotations

import time

import pytest

from kvd.service.peers import silence
from kvd.service.peers.silence import Silence, Silences
from kvd.wire.handshake import MOST_SILENT


def test_a_silence_counts_from_the_first_question_that_got_no_answer() -> None:
    one = Silence(last_heard=10.0, asked=20.0)
    assert one.since == 20.0


def test_where_others_had_no_answer_before_it_counts_from_then_but_not_from_before_an_answer() -> None:
    assert Silence(last_heard=10.0, asked=20.0, hearsay=15.0).since == 15.0
    assert Silence(last_heard=10.0, asked=20.0, hearsay=5.0).since == 10.0
    assert Silence(last_heard=10.0, asked=20.0, hearsay=25.0).since == 20.0


def test_an_answer_ends_it() -> None:
    one = Silence(last_heard=0.0, asked=0.0, hearsay=0.0)
    one.end()
    assert one.seconds < 1.0


def test_others_are_told_for_how_long_a_kvd_is_silent_until_it_answers() -> None:
    ours = Silences()
    ours.note("g1", time.monotonic() - 2.0)
    ((generation, seconds),) = ours.told()
    assert generation == "g1"
    assert seconds == pytest.approx(2.0, abs=1.0)
    ours.end("g1")
    assert ours.told() == ()


def test_what_is_heard_is_told_on_where_it_is_news_and_asked_about_once() -> None:
    asked: list[str] = []

    def suspect(generation: str, _since: float) -> bool:
        asked.append(generation)
        return generation == "news"

    ours = Silences(suspect)
    for _ in range(3):
        ours.hear([("news", 1.0)])
    ours.hear([("stale", 1.0), ("old", silence.TOLD_SECONDS), ("never", -1.0)])
    assert asked == ["news", "stale"]
    assert [generation for generation, _ in ours.told()] == ["news"]


def test_an_old_silence_is_not_told_and_of_many_some_are() -> None:
    ours, now = Silences(), time.monotonic()
    ours.note("old", now - silence.TOLD_SECONDS)
    assert ours.told() == ()
    for number in range(3 * MOST_SILENT):
        ours.note(f"g{number}", now)
    assert len(ours.told()) == MOST_SILENT
    assert ours.told() != ours.told()
