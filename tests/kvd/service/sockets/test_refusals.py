"""Who was not let in of late, as operators see it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvd.service.sockets import refusals
from kvd.service.sockets.refusals import MOST_REMEMBERED, Refusals
from kvd.zmtp.errors import ZmtpError


def test_a_host_that_keeps_trying_is_shown_though_a_stranger_has_many_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(refusals, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    noted = Refusals()
    ours = ZmtpError("not_authorised", "its key is not let in", key=b"H" * 40)
    noted.note("10.0.0.1", ours)
    for number in range(3 * MOST_REMEMBERED):
        noted.note(f"203.0.113.{number}", ZmtpError("not_authorised", "its key is not let in", key=b"S" * 40))
        noted.note("10.0.0.1", ours)
    rows = noted.rows()
    assert len(rows) == MOST_REMEMBERED
    assert rows[0].address == "10.0.0.1"
    assert rows[0].times == 3 * MOST_REMEMBERED + 1, "it was never forgotten"
