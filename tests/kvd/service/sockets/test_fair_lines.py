"""Lines for a few places: askers take turns, and none has all."""

from __future__ import annotations

import pytest

from kvd.service.sockets.fair_lines import FairLines, LineFull


def test_what_two_ask_for_waits_in_the_line_of_each() -> None:
    lines: FairLines[str] = FairLines(places=4, most=100)
    for number in range(20):
        lines.put(f"{number}.dead", "hostile")
    lines.put("peer.good", "hostile")
    lines.put("peer.good", "honest")
    assert lines.take() == ("0.dead", "hostile")
    assert lines.take() == ("peer.good", "honest")
    assert [lines.take(), lines.take()] == [("1.dead", "hostile"), ("2.dead", "hostile")]
    lines.done("honest")
    assert lines.take() is None, "three quarters of the places are one asker's at most"
    lines.done("hostile")
    assert lines.take() == ("3.dead", "hostile")


def test_a_line_has_an_end() -> None:
    lines: FairLines[int] = FairLines(places=1, most=8)
    for number in range(6):
        lines.put(number, "hostile")
    lines.put(0, "hostile")
    with pytest.raises(LineFull, match="6 wait for one user or host already"):
        lines.put(6, "hostile")
    lines.put(6, "honest")
    lines.put(7, "honest")
    with pytest.raises(LineFull, match="8 wait already"):
        lines.put(8, "third")
    lines.drop(0)
    lines.put(8, "third")
