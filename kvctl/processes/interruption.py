"""Ends the demo in order on Ctrl-C and its like: once, and never between starting a process and knowing of it.

Everything that the demo starts is registered for its end right after it was started. A KeyboardInterrupt between the
two, or in the middle of ending things, would leave something behind; so signals wait while either goes on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _Signals:
    """Signals belong to the whole process, and so does this."""

    holding: int = 0
    waiting: bool = False
    raised: bool = False
    notice: str = ""


_signals = _Signals()


@contextmanager
def one_interruption(notice: str) -> Iterator[None]:
    """Within: the first of `SIGNALS` raises KeyboardInterrupt as soon as none is held, later ones do nothing.

    ``notice`` is a line for stderr at that moment, since ending things may take seconds; empty for none. A signal that
    the parent ignores (nohup) stays ignored. For the main thread only.
    """
    _signals.waiting = _signals.raised = False
    _signals.notice = notice
    wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in wanted}
    try:
        yield
    finally:
        # After an interruption the process is about to end. The interpreter puts handlers of ours out of force on its
        # way out, and a second Ctrl-C would then make that end look like a crash.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if _signals.raised else handler)


def interrupted() -> bool:
    """Whether a signal came, held or not."""
    return _signals.raised or _signals.waiting


@contextmanager
def held() -> Iterator[None]:
    """Within: signals wait; one that came raises KeyboardInterrupt at the end."""
    _signals.holding += 1
    try:
        yield
    finally:
        _signals.holding -= 1
        if _signals.waiting and not _signals.holding:
            _signals.waiting, _signals.raised = False, True
            raise KeyboardInterrupt


@contextmanager
def unwinding() -> Iterator[ExitStack]:
    """An ExitStack that no signal interrupts while it ends what was entered."""
    with ExitStack() as after, ExitStack() as stack:
        try:
            yield stack
        finally:
            after.enter_context(held())


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    if interrupted():
        return
    if _signals.notice:
        # Not by way of sys.stderr: the signal may have come in the middle of a write to it.
        os.write(2, f"{_signals.notice}\n".encode())
    if _signals.holding:
        _signals.waiting = True
        return
    _signals.raised = True
    raise KeyboardInterrupt
