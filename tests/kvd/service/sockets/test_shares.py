"""How many requests of whom may wait."""

from __future__ import annotations

from kvd.service.sockets import limits
from kvd.service.sockets.shares import Waiter, WaitingShares


def filled(shares: WaitingShares, kind: str, users: int, processes: int, connections: int) -> list[Waiter]:
    """All that could wait of so many, each trying to get everything."""
    waiting = []
    for user in range(users):
        for process in range(processes):
            for connection in range(connections):
                one = Waiter(b"%d.%d.%d" % (user, process, connection), (user, process), kind, 100)
                while not shares.full(one):
                    shares.take(one)
                    waiting.append(one)
    return waiting


def test_a_connection_and_a_process_have_shares() -> None:
    shares = WaitingShares()
    assert len(filled(shares, "get_peer", 1, 1, 1)) == limits.MAX_TASKS_CONNECTION
    assert (
        shares.full(Waiter(b"0.0.0", (0, 0), "x", 1))
        == "1536 requests of this connection are waiting already"
    )
    shares = WaitingShares()
    filled(shares, "get_peer", 1, 1, 9)
    filled(shares, "get_sums", 1, 1, 9)
    assert "2560 requests of this process" in shares.full(Waiter(b"new", (0, 0), "x", 1))
    assert not shares.full(Waiter(b"new", (0, 1), "x", 1))


def test_one_kind_leaves_room_for_others_whoever_asks() -> None:
    shares = WaitingShares()
    filled(shares, "get_peer", 9, 9, 9)
    claim = Waiter(b"innocent", (0, 99), "lease_claim", 100)
    assert shares.full(claim) == ""
    assert shares.full(Waiter(b"innocent", (0, 99), "get_peer", 100))


def test_the_largest_host_that_starts_asks_for_its_peers_at_once_and_another_user_asks_too() -> None:
    """64 engines of one user, each with 128 workers and a scheduler."""
    shares = WaitingShares()
    for client in range(64 * (128 + 1)):
        one = Waiter(b"%d" % client, (0, client), "get_peer", 400)
        assert not shares.full(one)
        shares.take(one)
    filled(shares, "get_peer", 1, 9, 9)
    assert "of kind get_peer of this user" in shares.full(Waiter(b"new", (0, 9999), "get_peer", 400))
    assert not shares.full(Waiter(b"other", (1, 9999), "get_peer", 400))


def test_all_is_given_back() -> None:
    shares = WaitingShares()
    for waiter in filled(shares, "get_peer", 9, 9, 9):
        shares.give_back(waiter)
    assert shares.full(Waiter(b"0.0.0", (0, 0), "get_peer", 100)) == ""


def test_what_waits_is_bounded_in_bytes() -> None:
    shares = WaitingShares()
    large = Waiter(b"r", (0, 0), "push_announce", limits.MAX_WAITING_PROCESS_BYTES)
    assert not shares.full(large)
    shares.take(large)
    assert "bytes are waiting already" in shares.full(large)
    assert not shares.full(Waiter(b"s", (0, 1), "push_announce", 100))
