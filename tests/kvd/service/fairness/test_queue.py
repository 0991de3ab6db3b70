"""Who is served next."""

from __future__ import annotations

from kvd.service.fairness.queue import FairQueue


def test_users_take_turns_and_so_do_the_processes_of_each() -> None:
    turns: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3"):
        turns.put(("anna", 1), item)
    turns.put(("anna", 2), "b1")
    turns.put(("otto", 7), "o1")
    turns.put(("otto", 7), "o2")
    assert [turns.take() for _ in range(7)] == ["a1", "o1", "b1", "o2", "a2", "a3", None]
    assert not turns
