"""The glossary stays short, and the docs use its words instead of older ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MOST_TERMS = 45

OLD = {
    r"open_home": "backend",
    r"put-?outs?": "stage, stage order",
    r"undead": "unclosed",
    r"bur(y|ied|ies)": "retry the close (of a lane), hidden (of knowledge)",
    r"landings?": "window",
    r"underway": "under way, or arrivals",
    r"verdicts?": "compatibility, or what is known of it",
    r"conversations?": "session thread",
    r"picks": "selection",
    r"RankId": "Rank",
    r"intakes?": "admission queue",
    r"meetings?": "overlaps, or blocks that are paired",
    r"timelines": "history of misses",
    r"(event|stream) marks?|marks? of (a|the) stream": "stream event",
    r"pushed callbacks?": "on_message",
}
"""Words that the code and the docs no longer use, and what they say instead."""

NAMES = r"\b(?:Home|open_home|PutOuts?|put_outs?|[Uu]ndead|Landings?|Ready|Gate|Underway|Intake|Here|Talk|Parts|Kept)\b"
"""Of these names none is left, so no page has one between backticks."""

SENTENCES = (
    "ran nothing of ours",
    "listens to its host alone",
    "statement less `clock_skew`",
    "cannot be given up safely",
    "waits for no disk",
    "also when all bytes came",
    "is not seen in a step",
    "rounds are loud",
    "of another number add up",
    "is nothing to rely on",
    "where no kvd is, kvd is sure",
    "goes where the fewest are",
    "that was aimed at",
    "that was to come from outside",
)


def terms() -> list[str]:
    """The first column of the glossary's table."""
    rows = re.findall(r"^\| ([^|]+?) \|", GLOSSARY.read_text(), re.MULTILINE)
    return [row for row in rows if row != "word"]


def test_the_glossary_is_short_and_names_each_term_once() -> None:
    assert 30 <= len(terms()) <= MOST_TERMS
    assert len({term.lower() for term in terms()}) == len(terms())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_glossarys_words(page: Path) -> None:
    text = page.read_text()
    code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    old = {word: better for word, better in OLD.items() if re.search(rf"\b(?:{word})\b", code, re.IGNORECASE)}
    assert old == {}
    named = " ".join(re.findall(r"`[^`\n]*`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    assert re.findall(NAMES, named) == []
    assert [sentence for sentence in SENTENCES if sentence in " ".join(text.split())] == []
