"""Names and messages of others, as a log or a terminal may show them."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.shown import MAX_MESSAGE, MAX_WORD, brief, cut, escaped, few, has_controls, in_json

ANY_TEXT = st.text(st.characters() | st.sampled_from("\x00\x1b\n\r\t\x7f\x9b\u2028\u202e\ufeff"))


def test_control_characters_are_written_out() -> None:
    assert escaped("plain ünïcode 名 \U0001f600") == "plain ünïcode 名 \U0001f600"
    assert escaped("a\x1b[31m\r\n\tb") == r"a\x1b[31m\r\n\tb"
    assert escaped("\x9b\x7f\u202e\u2028\ud800") == r"\x9b\x7f\u202e\u2028\ud800"
    assert has_controls("a\nb")
    assert not has_controls("[red]\\x1b")


@settings(deadline=None)
@given(ANY_TEXT)
def test_what_is_shown_is_one_line_that_no_terminal_obeys(text: str) -> None:
    shown = escaped(text)
    assert not has_controls(shown)
    assert len(shown.splitlines()) <= 1
    assert escaped(shown) == shown
    shown.encode()


@settings(deadline=None)
@given(ANY_TEXT)
def test_json_means_the_same_without_them(text: str) -> None:
    document = json.dumps({"id": text}, ensure_ascii=False, indent=1)
    shown = in_json(document)
    assert json.loads(shown) == {"id": text}
    assert not has_controls(shown.replace("\n", ""))


def test_a_message_is_short_whatever_the_names_in_it() -> None:
    assert brief("short") == "short"
    assert brief("x" * 5000) == f"{'x' * MAX_WORD}...(5,000 characters)"
    assert brief(f"engine {'x' * 5000} is gone").endswith("...(5,000 characters) is gone")
    assert len(brief("word " * 1_000_000)) < MAX_MESSAGE + 50
    assert len(brief("x" * 1_000_000 + " y" * 1_000_000)) < MAX_MESSAGE + 50
    assert cut("abcdef", 3) == "abc... (6 characters)"


def test_few_names_of_many() -> None:
    assert few([]) == "none"
    assert few(["a", "b"]) == "a, b"
    assert few(str(number) for number in range(3000)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2,990 more"
    assert few(iter("ab"), count=12) == "a, b and 2 more"
