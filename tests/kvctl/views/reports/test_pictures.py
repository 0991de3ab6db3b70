"""Reports as a browser draws them: on a wide screen and on a phone's, light and dark; docs/pictures is made here.

A picture carries the digest of the page that it is of. With WRITE_DOCS they are drawn anew.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kvctl.views.reports import page as page_module
from kvctl.views.reports.benchmark import benchmark_page
from kvctl.views.reports.replay import replay_page
from kvctl.views.reports.trace import trace_page
from kvctl.views.trace import trace_document
from kvd.trace.model import RecordedTrace
from tests.kvctl.golden_documents import BEGAN, BENCHMARK, REPLAY
from tests.support.browser import CHROMIUM, Browser, browser
from tests.support.incident import incident

DOCS = Path(__file__).parents[4] / "docs"
LONG = "x" * 300
"""What no line has room for, nor a place to break."""
SCREENS: tuple[tuple[int, Literal["dark", "light"]], ...] = (
    (1200, "light"), (1200, "dark"), (400, "light"), (400, "dark"),
)  # fmt: skip
PICTURES: dict[str, tuple[str, tuple[int, int], Literal["dark", "light"]]] = {
    "incident-wide.png": ("trace", (1200, 1000), "light"),
    "incident-narrow.png": ("trace", (400, 1000), "dark"),
}
"""Those of docs/pictures: the beginning of which page, in a window of which width and height, and how."""
with_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here (`.ci/setup browser`)")

TEXTS = """[...function* () {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    if (!node.data.trim() || !node.parentElement.getClientRects().length) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let below = node.parentElement;
    while (getComputedStyle(below).backgroundColor === 'rgba(0, 0, 0, 0)' && below.parentElement)
      below = below.parentElement;
    for (const at of range.getClientRects())
      yield {text: node.data.slice(0, 40), left: at.left, right: at.right, top: at.top, bottom: at.bottom,
        ink: getComputedStyle(node.parentElement).color, paper: getComputedStyle(below).backgroundColor};
  }
}()]"""
"""Every line of text: where it is, its colour, and what is behind it."""
MARKS = """[...document.querySelectorAll('.track > i, .legend i, .field > i, .field > a')].map(mark => {
  const at = mark.getBoundingClientRect(), of = mark.parentElement.getBoundingClientRect();
  return {kind: mark.className, left: at.left, right: at.right, low: of.left, high: of.right,
    ink: getComputedStyle(mark).backgroundColor, over: mark.parentElement.className,
    paper: getComputedStyle(mark.closest('.track') || document.body).backgroundColor};
})"""
"""Every part of a bar and every dot: where it is, in what, and both colours."""


def page_of(trace: RecordedTrace, name: str = "incident.trace.zst") -> str:
    return trace_page(trace_document(trace, trace.transfers, name), trace)


def pages(name: str = "") -> dict[str, str]:
    """Each kind of report, of a host and versions that stay the same; ``name`` stands in all ids."""
    trace = incident(name)
    return {
        "trace": page_of(trace, f"incident{name}.trace.zst"),
        "replay": replay_page(REPLAY, trace, {500: {"nixl": 0.004, f"direct{name}": 0.001}}),
        "benchmark": benchmark_page(BENCHMARK),
    }


@pytest.fixture(autouse=True)
def same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes a page, where and when, as if it were always the same."""
    monkeypatch.setattr(page_module, "_user", lambda: "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("platform.platform", lambda: "Linux-6.1.0-x86_64-with-glibc2.36")
    monkeypatch.setattr("platform.python_version", lambda: "3.11.2")
    monkeypatch.setattr(page_module, "own_version", lambda: "0.1.0")
    monkeypatch.setattr(page_module, "installed_version", lambda *_: "1.5.1")
    monkeypatch.setattr("time.time", BEGAN.timestamp)
    monkeypatch.setattr(
        "sys.argv", ["kvctl", "trace", "show", "incident.trace.zst", "--report", "incident.html"]
    )


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


def light(color: str) -> float:
    """Relative luminance of a colour as WCAG 2 counts it."""
    parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Of two colours, 1 to 21."""
    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def covers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two texts share more than the edges of their lines."""
    across: float = min(one["right"], other["right"]) - max(one["left"], other["left"])
    down: float = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return across > 1 and down > 4


@with_browser
@pytest.mark.parametrize("name", ["", LONG], ids=["plain", "long-names"])
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
@pytest.mark.parametrize("kind", ["trace", "replay", "benchmark"])
def test_all_of_a_page_is_within_the_window_and_nothing_covers_another(
    window: Browser, tmp_path: Path, kind: str, width: int, scheme: Literal["dark", "light"], name: str
) -> None:
    shown = tmp_path / f"{kind}.html"
    shown.write_text(pages(name)[kind])
    window.show(shown, width, scheme)
    assert window.value("document.documentElement.scrollWidth") == width
    texts = window.value(TEXTS)
    assert len(texts) > 30
    assert [text for text in texts if text["left"] < 0 or text["right"] > width + 0.5] == []
    texts.sort(key=lambda text: text["top"])
    assert [
        (one["text"], other["text"])
        for at, one in enumerate(texts)
        for other in texts[at + 1 : at + 40]
        if covers(one, other)
    ] == []
    marks = window.value(MARKS)
    assert marks
    # A dot may stand on an edge of its field; a bar's part ends with its track.
    room = {True: 8.0, False: 0.5}
    assert [
        mark
        for mark in marks
        if mark["left"] < mark["low"] - room[mark["over"] == "field"]
        or mark["right"] > mark["high"] + room[mark["over"] == "field"]
    ] == []


@with_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["trace", "replay", "benchmark"])
def test_texts_and_bars_stand_out_from_what_is_behind_them(
    window: Browser, tmp_path: Path, kind: str, scheme: Literal["dark", "light"]
) -> None:
    """By WCAG's contrasts: 4.5 for text, 3 for what is drawn."""
    shown = tmp_path / f"{kind}.html"
    shown.write_text(pages()[kind])
    window.show(shown, 1200, scheme)
    texts, marks = window.value(TEXTS), window.value(MARKS)
    assert {text["paper"] for text in texts} >= {
        {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 23, 42)"}[scheme]
    }
    assert [(text["text"], text["ink"]) for text in texts if contrast(text["ink"], text["paper"]) < 4.5] == []
    assert [(mark["kind"], mark["ink"]) for mark in marks if contrast(mark["ink"], mark["paper"]) < 3] == []


def stamped(picture: bytes, digest: str) -> bytes:
    """A PNG with the digest of its page, as a text behind its header."""
    body = b"tEXtpage\0" + digest.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    header = len(b"\x89PNG\r\n\x1a\n") + 25
    return picture[:header] + chunk + picture[header:]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_in_docs_are_of_the_pages_as_they_are(name: str, tmp_path: Path) -> None:
    kind, (width, height), scheme = PICTURES[name]
    page, path = pages()[kind], DOCS / "pictures" / name
    digest = hashlib.sha256(page.encode()).hexdigest()
    if os.environ.get("WRITE_DOCS"):
        shown = tmp_path / "page.html"
        shown.write_text(page)
        with browser() as window:
            window.show(shown, width, scheme, height)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(stamped(window.picture(), digest))
    assert f"tEXtpage\0{digest}".encode() in path.read_bytes(), "WRITE_DOCS=1 draws it anew"
    assert any(f"pictures/{name})" in other.read_text() for other in DOCS.rglob("*.md"))
