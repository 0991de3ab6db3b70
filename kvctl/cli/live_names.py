"""What the completion scripts ask for on a press of Tab: the names that there are now, one a line, or nothing."""

from __future__ import annotations

import os
import re
import signal
import time

ASKED = "__names"
"""The word by which a script asks; no command of anybody who types."""
SECONDS = 0.2
"""Within which an answer is there, counted from the start of the process; who waits for Tab waits no longer."""
PROGRAM = f"timeout {SECONDS} kvctl {ASKED}"
"""What a script runs. A busy host may not even have started Python by then."""
PLAIN = re.compile(r"[A-Za-z0-9._/@%+:\[][A-Za-z0-9._/@%+:\[\]=-]*")
"""A name that no shell takes for anything else. Others choose names: what holds more than that is not offered."""


def offered(names: list[str]) -> str:
    """The names as a script reads them, each once, without those that are not `PLAIN`."""
    return "".join(f"{name}\n" for name in dict.fromkeys(names) if PLAIN.fullmatch(name))


def within_seconds() -> None:
    """End this process without a word once `SECONDS` are over."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    # Its processor time is about as long as it runs so far.
    signal.setitimer(signal.ITIMER_REAL, max(0.01, SECONDS - time.process_time()))
