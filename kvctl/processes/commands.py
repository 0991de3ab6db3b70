"""A process that takes commands as JSON lines on stdin and answers each with a line on stdout: the process's side."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvd.errors import KvdError

JsonCommand = dict[str, Any]
JsonResult = dict[str, Any]
Work = TypeVar("Work")
Handlers = Mapping[str, Callable[[Work, JsonCommand], JsonResult]]
"""What carries a command out, by the word under ``do``."""


def serve(
    begin: Callable[[JsonCommand], tuple[Work, JsonResult]],
    handlers: Handlers[Work],
    end: Callable[[Work], None],
) -> None:
    """Carry out commands until stdin ends. ``begin`` gets the first line, which says who this process is.

    A command that fails is answered with ``error``, and the process goes on; it ends after a beginning that failed.
    """
    # Whatever a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: JsonResult) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        work, answer = begin(json.loads(sys.stdin.readline()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side gets it in words
        say(_failed(error))
        return
    try:
        say(answer)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = handlers[command["do"]](work, command)
            except Exception as error:  # noqa: BLE001 - it fails this command, whatever it is
                answer = _failed(error)
            say(answer)
    finally:
        end(work)


def _failed(error: Exception) -> JsonResult:
    traceback.print_exc()
    told = error.with_hint if isinstance(error, KvdError) else str(error)
    return {"error": told or type(error).__name__}
