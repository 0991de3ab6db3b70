"""`kvctl describe-topology`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from kvd.topology.describe import describe

from kvctl import daemon
from kvctl.documents.topology import Topology, pair_document
from kvctl.engine_cards import engine_geometry
from kvctl.errors import PeerUnreachable, UsageError
from kvctl.options import Watch
from kvctl.parsing import near_misses
from kvctl.settings import Settings
from kvctl.watch import show_repeatedly
from kvd.wire import query
from kvd.wire.query import EngineRow


def describe_topology(
    settings: Settings,
    *,
    local: Annotated[
        str | None, typer.Argument(metavar="[ENGINE]", help="Only pairs that this engine is part of.")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Argument(metavar="[FROM]", help="Only: ENGINE reads from FROM, whatever their roles."),
    ] = None,
    watch: Watch = None,
) -> None:
    """Who reads which bytes of KV cache from whom.

    For every pair of engines that kvd knows: which rank reads from which, heads, bytes and separate copies a block. A
    pair is a decoding engine and a prefilling one of the same model; two named engines are compared whatever they are.
    With -o wide also each single read and the factors that agree.
    """

    def fetch() -> Topology:
        rows = daemon.ask(settings, query.ListEngines(cards=True), query.Engines).rows
        pairs = list(_chosen(rows, local, remote))
        if not pairs:
            sys.stderr.write(f"kvctl: no pair of engines to describe: {_why_none(rows)}\n")
        return Topology(
            pairs=tuple(pair_document(describe(engine_geometry(a), engine_geometry(b))) for a, b in pairs)
        )

    show_repeatedly(fetch, settings, watch)


def _chosen(
    rows: Sequence[EngineRow], local: str | None, remote: str | None
) -> Iterator[tuple[EngineRow, EngineRow]]:
    """The pairs (reader, source), as named or as roles and models suggest."""
    if local and remote:
        yield _ready(rows, local), _ready(rows, remote)
        return
    named = _ready(rows, local) if local else None
    for reader in rows:
        for source in rows:
            if _makes_sense(reader, source) and (named is None or named in (reader, source)):
                yield reader, source


def _makes_sense(reader: EngineRow, source: EngineRow) -> bool:
    return (
        reader is not source
        and reader.card is not None
        and source.card is not None
        and reader.engine.role in ("decode", "both")
        and source.engine.role in ("prefill", "both")
        and reader.engine.model == source.engine.model
    )


def _ready(rows: Sequence[EngineRow], engine_id: str) -> EngineRow:
    """The engine of that id. Raises `UsageError` when kvd knows none, `PeerUnreachable` when it is not complete."""
    row = next((row for row in rows if row.engine.engine_id == engine_id), None)
    if row is None:
        known = [row.engine.engine_id for row in rows]
        raise UsageError(
            f"kvd knows no engine {engine_id!r}; {near_misses(engine_id, known) or 'it knows none at all'}",
            "kvctl engines lists them",
        )
    if row.card is None:
        raise PeerUnreachable(
            f"engine {engine_id!r} is {row.state}, with {len(row.ranks)} of {row.engine.world_size} workers"
            + (f": {row.reason}" if row.reason else ""),
            f"see kvctl workers --engine {engine_id}",
        )
    return row


def _why_none(rows: Sequence[EngineRow]) -> str:
    if not rows:
        return "kvd knows no engine; start one that registers with it, then see kvctl engines"
    ready = [row for row in rows if row.card is not None]
    seen = ", ".join(
        f"{row.engine.engine_id} ({row.engine.role}, {row.engine.model}, {row.state})" for row in rows
    )
    if len(ready) < len(rows):
        return f"of {seen} only {len(ready)} can be described; see kvctl engines -o wide"
    return f"{seen} are no decoder and prefiller of one model; name two to compare them all the same"
