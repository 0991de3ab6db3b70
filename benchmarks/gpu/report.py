"""What a run leaves behind: one JSON object a line, written at once, and the ends of all logs in one archive."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LOG_LINES = 200
LONGEST_LINE = 2000


class Report:
    """The results of one run, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        """Begin a report; the folder is made, lines are added to those of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stage = ""
        self._began = time.monotonic()
        self._file = (folder / "results.jsonl").open("a", buffering=1, encoding="utf-8")

    def note(self, what: str, **fields: Any) -> None:
        """Write one result down; ``what`` is its kind."""
        line = {"stage": self.stage, "at": round(time.monotonic() - self._began, 2), "what": what, **fields}
        self._file.write(json.dumps(line, default=str) + "\n")

    def say(self, text: str) -> None:
        """One line for whoever watches."""
        sys.stdout.write(f"[{time.monotonic() - self._began:6.1f}] {text}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()

    def keep_logs(self, logs: Iterable[Path]) -> None:
        """Put the ends of logs into ``logs.tar.gz``, which replaces an earlier one of this run."""
        with tarfile.open(self.folder / "logs.tar.gz", "w:gz") as archive:
            for log in sorted(logs):
                text = tail(log).encode()
                entry = tarfile.TarInfo("-".join(log.parts[-2:]))
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a file, none longer than `LONGEST_LINE`."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return "".join(line[:LONGEST_LINE].rstrip("\n") + "\n" for line in deque(file, lines))
    except OSError as error:
        return f"{error}\n"


def read(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """All results in these folders, in order; ``run`` says which of them."""
    return [
        json.loads(line) | {"run": run}
        for run, folder in enumerate(folders)
        for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
