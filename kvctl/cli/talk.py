"""What kvctl says on stderr. Ids and messages in it come from others, so no terminal obeys what stands in them."""

from __future__ import annotations

import sys

from kvd.shown import escaped


def say(text: str) -> None:
    """One line on stderr, with control characters written out."""
    sys.stderr.write(f"kvctl: {escaped(text)}\n")
    sys.stderr.flush()


def plain_lines(text: str) -> str:
    """Text of several lines, each as a terminal may show it."""
    return "\n".join(escaped(line) for line in text.split("\n"))
