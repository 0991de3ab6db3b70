"""Opens the ledger's database whatever stands in its place, and writes one again whose files are lost."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from kvd.service.ledger import files, store
from kvd.service.ledger.faults import Damaged, fault_of, told

log = logging.getLogger(__name__)

OPENINGS = 4
"""How often something may be set aside in one attempt."""
COPY_PAGES = 256
"""Pages of one step while a database is copied: 1 MiB."""


def open_anyhow(path: Path, between: Callable[[], None]) -> sqlite3.Connection:
    """The database; what stands there and is none of ours is set aside, and a new one begins.

    ``between`` is as in `store.open_database`. Raises `sqlite3.Error` and `OSError` where that is not possible now.
    """
    for _ in range(OPENINGS):
        try:
            if files.odd(path):
                set_aside(path, "it is no file")
            return store.open_database(path, between)
        except store.NewerSchema as error:
            set_aside(path, str(error), f"{path.name}{files.NEWER}{error.version}-{time.time_ns()}")
        except sqlite3.Error as error:
            if fault_of(error) != "damaged":
                raise
            set_aside(path, told(error))
    raise Damaged(f"{OPENINGS} files in a row were damaged, new ones too")


def set_aside(path: Path, why: str, name: str = "") -> None:
    """As `files.set_aside`, and say so. Raises `OSError`."""
    if (aside := files.set_aside(path, name)) is not None:
        log.warning("the ledger %s cannot be used (%s): set aside as %s, a new one begins", path, why, aside)


def write_again(database: sqlite3.Connection, path: Path, between: Callable[[], None]) -> None:
    """Write an open database to the path where its files stood; what stands there now is set aside.

    ``between`` is called again and again meanwhile. Raises `sqlite3.Error` and `OSError`; all is as before then.
    """
    part = Path(f"{path}.part")
    whole = path.with_name(f"{path.name}{files.DAMAGED}{time.time_ns()}")
    try:
        for suffix in ("", "-journal", *files.COMPANIONS):
            Path(f"{part}{suffix}").unlink(missing_ok=True)
        with closing(sqlite3.connect(part, isolation_level=None)) as copy:
            database.backup(copy, pages=COPY_PAGES, progress=lambda *_: between())
        part.rename(whole)  # a kvd that starts now takes it over, should this one end here
        set_aside(path, "it is not the one that was opened")
        whole.rename(path)
        files.sync(path.parent)
    except BaseException:
        for copied in (part, whole):  # ours, and the database that it is of is still open
            with suppress(OSError):
                copied.unlink(missing_ok=True)
        raise
