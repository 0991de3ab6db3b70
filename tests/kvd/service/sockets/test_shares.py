"""How many requests of whom may wait."""

from __future__ import annotations

from collections.abc import Hashable

from kvd.service.fairness.budget import ALL, Budget
from kvd.service.sockets import limits
from kvd.service.sockets.shares import shares_of_waiting
from kvd.wire.limits import bytes_allowed


class Waiting:
    """Requests of 100 bytes that wait, each of a user's process on a connection of it."""

    def __init__(self) -> None:
        self.budget = Budget("requests", "bytes")

    def full(self, user: Hashable, process: int, connection: int, kind: str) -> str:
        """Why one more may not wait; where it may, it does."""
        route = f"{user}.{process}.{connection}".encode()
        shares = shares_of_waiting(route, (user, process), kind)
        if not (full := self.budget.full(shares, 100)):
            self.budget.take(shares, 100)
        return full

    def fill(self, kind: str, users: int, processes: int, connections: int) -> int:
        """All that may wait of so many, each of which tries to get everything; how many that are."""
        for user in range(users):
            for process in range(processes):
                for connection in range(connections):
                    while not self.full(user, process, connection, kind):
                        pass
        return self.budget.counts[ALL]


def test_a_connection_and_a_process_have_shares() -> None:
    waiting = Waiting()
    assert waiting.fill("get_peer", 1, 1, 1) == limits.MAX_TASKS_CONNECTION
    assert waiting.full(0, 0, 0, "x").startswith("1536 requests of this connection with 153600 bytes wait")
    waiting.fill("get_peer", 1, 1, 9)
    waiting.fill("get_sums", 1, 1, 9)
    assert "2560 requests of this process" in waiting.full(0, 0, 9, "x")
    assert not waiting.full(0, 1, 0, "x")


def test_one_kind_leaves_room_for_others_whoever_asks() -> None:
    waiting = Waiting()
    waiting.fill("get_peer", 9, 9, 9)
    assert waiting.full(0, 99, 0, "lease_claim") == ""
    assert waiting.full(0, 99, 0, "get_peer")


def test_the_largest_host_that_starts_asks_for_its_peers_at_once_and_another_user_asks_too() -> None:
    """64 engines of one user, each with 128 workers and a scheduler."""
    waiting = Waiting()
    for client in range(64 * (128 + 1)):
        assert not waiting.full(0, client, 0, "get_peer")
    waiting.fill("get_peer", 1, 9, 9)
    assert "of kind get_peer of this user" in waiting.full(0, 9999, 0, "get_peer")
    assert not waiting.full(1, 9999, 0, "get_peer")


def test_a_host_with_its_key_takes_less_than_a_third_of_a_kind() -> None:
    waiting = Waiting()
    for connection in range(9):
        while not waiting.full(b"key", 0, connection, "describe_engine"):
            pass
    assert 3 * waiting.budget.counts["kind", "describe_engine"] < limits.MAX_TASKS_KIND
    assert not waiting.full(b"another key", 0, 0, "describe_engine")


def test_what_waits_is_bounded_in_bytes() -> None:
    budget, large = Budget("requests", "bytes"), limits.MAX_WAITING_PROCESS_BYTES
    shares = shares_of_waiting(b"r", (0, 0), "push_announce")
    assert not budget.full(shares, large)
    budget.take(shares, large)
    assert "of this process with 16777216 bytes wait already" in budget.full(shares, large)
    assert not budget.full(shares_of_waiting(b"s", (0, 1), "push_announce"), 100)


def test_what_a_user_has_waiting_leaves_room_for_its_cards_to_arrive() -> None:
    """All engines of a host are one user's: while a disk hangs their reports must not keep new ones out."""
    budget, large = Budget("requests", "bytes"), 4 << 20
    process = 0
    while not (
        full := budget.full(shares := shares_of_waiting(b"%d" % process, (0, process), "report"), large)
    ):
        budget.take(shares, large)
        process += 1
    assert "of this user with 33554432 bytes wait already" in full
    left = limits.INCOMING_USER_BYTES - limits.MAX_WAITING_USER_BYTES
    assert left >= 2 * bytes_allowed("register_worker")
    assert not budget.full(shares_of_waiting(b"other", (1, 0), "report"), large)
    assert limits.MAX_WAITING_BYTES < limits.INCOMING_BYTES
    assert limits.MAX_WAITING_PROCESS_BYTES < limits.INCOMING_PROCESS_BYTES
