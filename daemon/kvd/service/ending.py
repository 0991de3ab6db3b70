"""How kvd ends at once when it has lost a part of itself: it says which, and is started anew."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn

from kvd.service.log import writers

log = logging.getLogger(__name__)

FAULT = 1
"""The exit status of a kvd that ends for a fault of its own."""


def end_now(why: str, error: BaseException | None = None) -> NoReturn:
    """End the process with status 1, from any thread. Whatever happens to the log line, the process ends."""
    try:
        log.critical("kvd ends, so that it can be started again: %s", why, exc_info=error)
        for writer in writers():
            writer.finish()
    except BaseException:  # noqa: BLE001 (no memory, most likely; the process ends)
        with contextlib.suppress(BaseException):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"kvd ends: see its last lines\n")
    os._exit(FAULT)


def end_with_threads() -> None:
    """From now on a thread that an exception ends, ends kvd: one that works with a part missing looks well."""
    threading.excepthook = _thread_ended


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit:
        return
    name = ended.thread.name if ended.thread is not None else "unknown"
    end_now(f"its thread {name} ended: {ended.exc_type.__name__}: {ended.exc_value}", ended.exc_value)
