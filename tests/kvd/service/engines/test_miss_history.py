"""What is remembered of orders: so many, and so many bytes, and nobody pushes out another user's."""

from __future__ import annotations

import pytest

from kvd.service.engines import miss_history as module
from kvd.service.engines.miss_history import MissHistory
from kvd.wire.order import Miss
from tests.support.orders import order


def miss(request_id: str, **given: object) -> Miss:
    return Miss(request_id=request_id, prefiller="p", state="forced", tokens=1, **given)  # type: ignore[arg-type]


def learn(history: MissHistory, order_id: str, uid: int, one: Miss | None = None) -> None:
    history.learn(order("e", order_id, "i", uid), uid, one)


def test_beyond_a_users_bytes_the_order_that_was_reported_of_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES_OF_USER", 50_000)
    history = MissHistory()
    learn(history, "another user's", 1002, miss("r"))
    for name in "abc":
        learn(history, name, 1001)
    for number in range(200):
        learn(history, "a" if number % 2 else "c", 1001, miss(f"r{number}"))
        assert history._bytes[1001] <= 50_000
    assert history.get("b") is None
    kept = history.get("a") or history.get("c")
    assert kept is not None
    assert f"r{199 if history.get('a') else 198}" in kept.misses, "the newest misses stay"
    assert history.get("another user's") is not None


def test_beyond_the_bytes_of_all_the_user_that_has_most_loses_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 60_000)
    history = MissHistory()
    learn(history, "small", 1002, miss("r"))
    for name in "abcdefgh":
        for number in range(20):
            learn(history, name, 1001, miss(f"r{number}"))
    assert history._bytes.total <= 60_000
    assert history.get("small") is not None
    assert history.get("h") is not None
    assert history.get("a") is None


def test_what_takes_no_more_leaves_no_trace() -> None:
    history = MissHistory()
    for number in range(200):
        learn(history, f"o{number}", 1001, miss("r", cause="c" * 10_000, steps={"s" * 500: 1.0}))
    kept = history.get("o199")
    assert kept is not None
    assert [len(name) for name in kept.misses["r"].steps] == [module.LONGEST_STEP]
    assert history.get("o135") is None
    assert history._bytes[1001] == sum(one.size for one in history.newest())
