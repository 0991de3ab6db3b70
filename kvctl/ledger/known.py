"""Which engines a filter may name: those of the ledger or the trace, and those that kvd knows."""

from __future__ import annotations

from kvctl import daemon
from kvctl.cli.parsing import near_misses
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.ledger.rows import PAGE, rows
from kvd.wire.transfer import ListTransfers


def refuse_unknown(settings: Settings, source: str, *engines: str) -> None:
    """Raise `UsageError` for an engine of which there is no transfer at all, and which kvd does not know either.

    To be asked where a question found nothing: an engine that is known and has no such transfer is no mistake.
    """
    nowhere = [engine for engine in engines if engine and not _named(settings, source, engine)]
    if not nowhere:
        return
    newest = rows(settings, ListTransfers(), PAGE, source)
    if newest.hidden:  # it may be one of those
        return
    names = {name for row in newest.rows for name in (row.record.local_engine, row.record.remote_engine)}
    names |= set() if source else {row.engine.engine_id for row in daemon.engines(settings)}
    for engine in nowhere:
        if engine not in names:
            where = f"the trace {source!r} has" if source else "kvd knows, and its ledger has,"
            raise UsageError(
                f"{where} no engine {engine!r}; {near_misses(engine, sorted(names)) or 'there is none at all'}",
                "kvctl transfers --by pair lists those that moved something",
            )


def _named(settings: Settings, source: str, engine: str) -> bool:
    return bool(rows(settings, ListTransfers(engine_id=engine), 1, source).rows)
