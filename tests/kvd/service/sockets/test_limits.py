"""How many connections the limit of open files allows."""

from __future__ import annotations

import pytest

from kvd.service.sockets.limits import connection_counts, share_of


@pytest.mark.parametrize("limit", [64, 256, 1024, 4096, 65536, 1 << 20])
def test_connections_their_processes_and_links_fit_and_leave_a_reserve(limit: int) -> None:
    counts = connection_counts(limit)
    taken = 2 * (counts.local + counts.peer + counts.events) + counts.links
    assert taken <= limit - min(256, limit // 4)
    assert min(counts.local, counts.peer, counts.events, counts.links) > 0


TOOLS = 64
"""Of operators, who are of the same user as the workers in a lab."""


def test_a_unit_of_systemds_has_room_for_ten_thousand_clients_of_one_user() -> None:
    counts = connection_counts(65536)
    assert share_of(counts.local) >= 10_000 + TOOLS
    assert counts.local - share_of(counts.local) >= 2048
    assert counts.peer >= 2048
