"""Codes of refusals: one list, which holds all that are sent and none that nobody sends."""

from __future__ import annotations

import re
from pathlib import Path

from kvd.service.errors import RequestRefused
from kvd.wire.codes import CODES, OTHER, counted_as
from kvd.wire.reply import Refused

ROOT = Path(__file__).parents[3]
LIST = ROOT / "daemon" / "kvd" / "wire" / "codes.py"
SOURCES = [
    path.read_text() for room in ("daemon", "kvctl") for path in (ROOT / room).rglob("*.py") if path != LIST
]
OF_CLASSES = {
    code for text in SOURCES for code in re.findall(r'^    code.* = "(KVD[A-Z-]*)"', text, re.MULTILINE)
}
WRITTEN = {code for text in SOURCES for code in re.findall(r'"(KVD-[A-Z-]+)"', text)}


def test_a_code_in_the_sources_is_one_of_the_list_or_of_a_class_of_errors() -> None:
    assert set() == WRITTEN - CODES - OF_CLASSES


def test_a_code_of_the_list_is_used() -> None:
    assert set() == CODES - WRITTEN


def test_refusals_of_others_are_counted_by_our_codes_and_what_they_make_up_as_one() -> None:
    ours = ("KVD-NOT-YOUR-ENGINE", "KVD-KEY-REVOKED", "KVD-NOT-DESCRIBED", "KVD-TOO-MANY-READERS")
    for code, counted in (*((code, code) for code in ours), ("KVD-X-1", OTHER), ("x" * 500, OTHER)):
        refused = RequestRefused.passed_on(Refused(code=code, message="m"))
        assert (counted_as(refused.code), refused.refused.code) == (counted, code)
