"""Text that others chose (ids, names, messages), as messages, log lines and terminals may show it.

It is kept short, and control characters are written out: an id may hold an escape sequence or a line break.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from itertools import islice

MAX_MESSAGE = 1000
"""Characters of a message that is sent to somebody: an error is one line, whatever the names in it."""
MAX_WORD = 200
"""Characters of one word of such a message. Real ids have less; a longer one would leave no room for the cause."""
MAX_NAMES = 10
"""Names that a message lists."""
MAX_LINE = 4096
"""Characters of a line of a log."""

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: what terminals obey
    "\u2028\u2029"  # line and paragraph separators
    "\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff"  # what turns the order of the text around, or cannot be seen
    "\ud800-\udfff]"  # halves of characters, which no file takes
)
_LONG_WORD = re.compile(rf"(\S{{{MAX_WORD}}})(\S{{20,}})")
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(text: str) -> str:
    r"""The text in one line, with control characters as they are typed in programs: ``\x1b``, ``\n``."""
    return text if text.isascii() and text.isprintable() else _CONTROLS.sub(_escape, text)


def has_controls(text: str) -> bool:
    """Whether `escaped` would change the text."""
    return _CONTROLS.search(text) is not None


def in_json(text: str) -> str:
    """A JSON document without control characters of Unicode, which JSON would let stand: they become its escapes."""
    return _CONTROLS.sub(lambda found: found[0] if found[0] in "\n\r\t" else f"\\u{ord(found[0]):04x}", text)


def cut(text: str, most: int) -> str:
    """At most about ``most`` characters of a text, and how many it had."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def brief(text: str) -> str:
    """A message that is small whatever the names in it: `MAX_WORD` characters of a word, `MAX_MESSAGE` in all."""
    if len(text) <= MAX_WORD:
        return text
    # Of a very long text only the front is looked at.
    front = text[: 50 * MAX_MESSAGE]
    words = _LONG_WORD.sub(lambda word: f"{word[1]}...({len(word[0]):,} characters)", front)
    if len(front) == len(text):
        return cut(words, MAX_MESSAGE)
    return words if len(words) < MAX_MESSAGE else f"{words[:MAX_MESSAGE]}... ({len(text):,} characters)"


def few(names: Iterable[str], *, count: int | None = None) -> str:
    """The first `MAX_NAMES` of some names, and how many more there are; "none" where there are none.

    ``count`` is the number of all, for names that have no length.
    """
    if count is None:
        names = list(names)
        count = len(names)
    shown = ", ".join(islice(names, MAX_NAMES))
    more = f" and {count - MAX_NAMES:,} more" if count > MAX_NAMES else ""
    return f"{shown}{more}" or "none"


def logger(name: str) -> logging.Logger:
    """The logger of a module. What it logs is one line of at most `MAX_LINE` characters, without control characters.

    The process may be vLLM's, whose handlers and formats are not ours: so the record itself is changed.
    """
    made = logging.getLogger(name)
    made.addFilter(_one_line)
    return made


def _one_line(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 (arguments that do not fit: the handler says which)
        return True
    shown = escaped(cut(text, MAX_LINE))
    if shown != text:
        record.msg, record.args = shown, ()
    return True


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    return _NAMED.get(character) or (f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}")
