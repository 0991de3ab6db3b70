"""Pictures of `kvctl top` in docs/pictures are what it draws. A stale one fails; with WRITE_DOCS=1 it is drawn anew."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("textual", reason="kvctl top's full screen needs textual")

from kvctl.cli.settings import Settings
from kvctl.commands.transfer import whole
from kvctl.top.app import TopApp, Watched
from kvctl.top.looking import look

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from tests.kvctl.conftest import FakeDaemon

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
SIZE = (100, 18)
NEVER = 3600.0
"""Seconds until it would look again: one picture shows one look."""
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""A page of ours loads nothing from elsewhere; without them it is the reader's own monospaced font."""
OF = {
    "top": (),
    "top-transfer": ("4", "down", "enter"),
}
"""By name of the picture: the keys that are pressed first."""


@pytest.mark.parametrize("name", OF)
def test_a_picture_of_top_is_what_it_draws(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("kvctl.cli.numbers.now", lambda: datetime(2026, 11, 18, 11, 7, 10, tzinfo=UTC))
    monkeypatch.setattr("kvctl.top.app.now", lambda: datetime(2026, 11, 18, 11, 7, 10, tzinfo=UTC))
    monkeypatch.delenv("NO_COLOR", raising=False)
    settings = Settings(runtime_dir=str(daemon.directory))
    made = TopApp(Watched(partial(look, settings), partial(whole, settings), "/run/kvd"), NEVER)
    drawn = asyncio.run(_drawn(made, OF[name]))
    path = PICTURES / f"{name}.svg"
    if os.environ.get("WRITE_DOCS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn)
    assert path.read_text() == drawn


async def _drawn(made: TopApp, keys: tuple[str, ...]) -> str:
    async with made.run_test(size=SIZE) as pilot:
        await _until(pilot, lambda: made.seen is not None)
        for key in keys:
            await pilot.press(key)
        await _until(pilot, lambda: "enter" not in keys or len(made.screen_stack) > 1)
        await pilot.pause()
        picture = FONTS.sub("", made.export_screenshot(title="kvctl top"))
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


async def _until(pilot: Pilot[None], there: object) -> None:
    assert callable(there)
    async with asyncio.timeout(30):
        while not there():
            await pilot.pause(0.02)
