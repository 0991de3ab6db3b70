"""Makes a trace of the ledger's rows: which engines they name, what kvd keeps of those, and how ids are written."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import BinaryIO

from kvctl import daemon
from kvctl.cli.numbers import counted
from kvctl.cli.settings import Settings
from kvctl.errors import CheckFailed, RefusedError
from kvctl.ledger.rows import every_row
from kvctl.ledger.trace_rows import traced
from kvd.client.cards import described_engine
from kvd.geometry.codec import decode_worker
from kvd.geometry.errors import GeometryError
from kvd.installed import own_version
from kvd.trace.anonymous import digest
from kvd.trace.model import SCHEMA, EngineLine, Header, TracedEngine
from kvd.trace.write import write_trace
from kvd.wire.codes import RefusalCode
from kvd.wire.transfer import GetKeptEngine, KeptEngine, LedgerRow, ListTransfers

NO_ENGINE: RefusalCode = "KVD-NO-ENGINE"


@dataclass(frozen=True)
class Gathered:
    """What a trace is made of: rows in order of their start, engines by id and generation in the order of first use."""

    rows: tuple[LedgerRow, ...]
    engines: dict[tuple[str, str], TracedEngine]

    @property
    def told(self) -> str:
        """What was exported, for a person."""
        unknown = [key[0] for key, engine in self.engines.items() if engine.geometry is None]
        text = f"{counted(len(self.rows), 'transfer')} between {counted(len(self.engines), 'engine')}"
        if not unknown:
            return text
        names = ", ".join(sorted(set(unknown)))
        return f"{text}; no geometry is known of {names}: their transfers cannot be replayed"


def gather(settings: Settings, query: ListTransfers, last: int) -> Gathered:
    """The rows that match and what kvd keeps of their engines. Raises `KvctlError`."""
    rows = sorted(every_row(settings, query, last), key=lambda row: (row.record.started, row.seq))
    keys = dict.fromkeys(
        key
        for row in rows
        for r in (row.record,)
        for key in ((r.local_engine, r.local_generation), (r.remote_engine, r.remote_generation))
    )
    return Gathered(tuple(rows), {key: _engine(settings, *key) for key in keys})


def export_trace(gathered: Gathered, out: BinaryIO, *, hashed: bool) -> None:
    """Write the trace. With ``hashed`` ids of requests become digests whose salt is thrown away."""
    salt = secrets.token_bytes(32)
    numbers = {key: number for number, key in enumerate(gathered.engines)}
    began = gathered.rows[0].record.started
    header = Header(schema=SCHEMA, began=began, hashed=hashed, written_by=f"kvctl {own_version()}")

    def names(row: LedgerRow) -> tuple[str, str]:
        record = row.record
        if not hashed:
            return record.transfer_id, record.request_id
        name = digest(record.request_id, salt)
        return f"{name}@{record.local_rank}", name

    write_trace(
        out,
        header,
        gathered.engines.values(),
        (
            traced(
                row.record,
                began,
                numbers[row.record.local_engine, row.record.local_generation],
                numbers[row.record.remote_engine, row.record.remote_generation],
                names(row),
            )
            for row in gathered.rows
        ),
    )


def _engine(settings: Settings, engine_id: str, generation: str) -> TracedEngine:
    line = EngineLine(engine_id=engine_id, generation=generation)
    try:
        asked = GetKeptEngine(engine_id=engine_id, generation=generation)
        kept = daemon.ask(settings, asked, KeptEngine)
    except RefusedError as error:
        if error.code == NO_ENGINE:
            return TracedEngine(line, None)
        raise
    try:
        workers = tuple(decode_worker(data) for data in kept.geometries)
    except GeometryError as error:
        raise CheckFailed(
            f"the geometry that the ledger has of {engine_id!r} cannot be read: {error}",
            "kvctl and kvd should be of one version",
            error.code,
        ) from None
    return TracedEngine(line, described_engine(kept.engine, generation, workers))
