"""A peer's thread goes its rounds: it takes what was put in, outlives errors, and ends after what came before that."""

from __future__ import annotations

import queue
import threading

import pytest

from kvd.worker.inbox_thread import InboxThread, Rounds
from kvd.worker.push.looks import Looks
from tests.support.rigs.bench import eventually

SECONDS = 10.0


class Owner:
    """Notes what its thread has it do; `hold` keeps the thread in its first turn until it is set."""

    def __init__(self, *, one_by_one: bool = False, bell: Looks | None = None) -> None:
        self.did: queue.Queue[str] = queue.Queue()
        self.hold = threading.Event()
        self.hold.set()
        self.wait: float | None = None
        rounds = Rounds(
            lambda: self.wait, self._take, self._turn, self._failed, lambda: self.did.put("finish"),
            begin=lambda: self.did.put("begin"),
        )  # fmt: skip
        self.thread = InboxThread("kvd-test", "the test", rounds, one_by_one=one_by_one, bell=bell)

    def _take(self, word: str) -> None:
        if word == "bad":
            raise ValueError(word)
        self.did.put(word)

    def _turn(self) -> None:
        self.did.put("turn")
        self.hold.wait(SECONDS)

    def _failed(self, error: Exception) -> None:
        self.did.put(f"failed: {error}")

    def next(self, number: int) -> list[str]:
        return [self.did.get(timeout=SECONDS) for _ in range(number)]

    def end(self) -> None:
        self.hold.set()
        self.thread.stop()
        assert self.thread.join(SECONDS)


def test_a_round_takes_all_words_that_have_come() -> None:
    owner = Owner()
    owner.hold.clear()
    owner.thread.put("a")
    assert owner.next(3) == ["begin", "a", "turn"]
    owner.thread.put("b")
    owner.thread.put("c")
    owner.hold.set()
    assert owner.next(3) == ["b", "c", "turn"]
    owner.end()
    assert owner.next(1) == ["finish"]


def test_or_one_by_one() -> None:
    owner = Owner(one_by_one=True)
    owner.hold.clear()
    owner.thread.put("a")
    owner.thread.put("b")
    owner.hold.set()
    assert owner.next(5) == ["begin", "a", "turn", "b", "turn"]
    owner.end()


def test_a_round_without_a_word_comes_when_its_pause_is_over() -> None:
    owner = Owner()
    owner.wait = 0.0
    owner.thread.put("a")
    assert owner.next(4) == ["begin", "a", "turn", "turn"]
    owner.end()


def test_an_error_ends_its_round_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    owner.thread.put("bad")
    owner.thread.put("a")
    assert owner.next(4) == ["begin", "failed: bad", "a", "turn"]
    assert "the test: unexpected error" in caplog.text
    eventually(lambda: owner.thread.idle)
    owner.end()


def test_words_before_the_stop_are_taken_and_no_turn_follows() -> None:
    owner = Owner()
    owner.hold.clear()
    owner.thread.put("a")
    assert owner.next(3) == ["begin", "a", "turn"]
    owner.thread.put("b")
    owner.thread.stop()
    assert not owner.thread.idle
    assert not owner.thread.join(0.0)
    owner.hold.set()
    assert owner.next(2) == ["b", "finish"]
    assert owner.thread.join(SECONDS)
    assert not owner.thread.alive
    assert not owner.thread.idle, "what ends takes no words any more"


def test_with_a_bell_that_wakes_it_too() -> None:
    bell = Looks()
    owner = Owner(bell=bell)
    bell.ring(urgent=True)
    assert owner.next(2) == ["begin", "turn"]
    owner.thread.put("a")
    assert owner.next(2) == ["a", "turn"]
    owner.end()


def test_a_word_put_in_by_the_way_brings_no_round_about() -> None:
    owner = Owner()
    owner.thread.put("a")
    assert owner.next(3) == ["begin", "a", "turn"]
    owner.thread.put_by("b")
    eventually(lambda: owner.thread.idle)
    owner.thread.put("c")
    assert owner.next(3) == ["c", "b", "turn"]
    owner.end()
