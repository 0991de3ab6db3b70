"""Transfers as workers and schedulers report them, and what operators ask of the ledger."""

from __future__ import annotations

import msgspec

from kvd.service.errors import Refusal
from kvd.service.handlers.senders import scheduler_of
from kvd.service.parts import Parts
from kvd.service.sockets.router import Caller
from kvd.wire.identity import EngineCard
from kvd.wire.miss import known_code
from kvd.wire.reply import Ok
from kvd.wire.transfer import (
    SCHEDULER_RANK,
    GetKeptEngine,
    KeptEngine,
    ListTransfers,
    ReportTransfers,
    TransferRecord,
    Transfers,
)


async def report_transfers(parts: Parts, caller: Caller, message: ReportTransfers) -> Ok:
    """Take records; answered once they are on disk. Raises `LedgerError`, and `Refusal` for who speaks for another."""
    for record in message.records:
        if record.local_rank == SCHEDULER_RANK:
            _check_scheduler(parts, caller, record)
    records = tuple(_completed(parts, message.incarnation, record) for record in message.records)
    for record in await parts.ledger.append(records, _unknown_engines(parts, records)):
        parts.counters[f"transfers.{record.state}"] += 1
        if record.checksum.state:
            parts.counters[f"checksums.{record.checksum.state}"] += 1
        if record.state == "done":
            parts.counters["transfers.bytes"] += record.bytes
        else:
            parts.counters[f"misses.{record.code}"] += 1
            parts.events.emit(
                "transfer.miss", record.request_id, local=record.local_engine, rank=record.local_rank,
                remote=record.remote_engine, code=record.code, cause=record.cause,
            )  # fmt: skip
    return Ok()


def _check_scheduler(parts: Parts, caller: Caller, record: TransferRecord) -> None:
    """Raise `Refusal` for what only an engine's scheduler may report, and for what it cannot know."""
    client = scheduler_of(parts, caller, record.local_engine, final=True)
    if record.state != "miss":
        raise Refusal(
            "KVD-NOT-OWNER",
            f"{client.name} cannot report a transfer that is {record.state}: no load was ordered",
            hint="a scheduler reports misses of its own engine",
            final=True,
        )


def _completed(parts: Parts, incarnation: str, record: TransferRecord) -> TransferRecord:
    """The record with a code of ours, and the generation of the engine that reports it, which it may not know."""
    code = known_code(record.code) if record.state == "miss" else ""
    if code != record.code:
        record = msgspec.structs.replace(record, code=code)
    client = parts.registry.clients.get(incarnation)
    if record.local_generation or client is None or client.engine.engine_id != record.local_engine:
        return record
    generation = parts.registry.engines[record.local_engine].generation
    return msgspec.structs.replace(record, local_generation=generation)


def _unknown_engines(parts: Parts, records: tuple[TransferRecord, ...]) -> list[EngineCard]:
    """Cards of engines that these records name and the ledger does not have, as far as they are known here."""
    named = {
        key
        for r in records
        for key in ((r.local_engine, r.local_generation), (r.remote_engine, r.remote_generation))
    }
    found = []
    for engine_id, generation in named - parts.ledger.known:
        local = parts.registry.ready(engine_id)
        if local is not None and local.generation == generation:
            found.append(local.card())
            continue
        cards = (peer.card for (_, peer_id), peer in parts.handshakes.peers.items() if peer_id == engine_id)
        found += [card for card in cards if card.generation == generation][:1]
    return found


async def list_transfers(parts: Parts, _caller: Caller, message: ListTransfers) -> Transfers:
    """Rows of the ledger. Raises `LedgerError`."""
    return await parts.ledger.select(message)


async def get_kept_engine(parts: Parts, _caller: Caller, message: GetKeptEngine) -> KeptEngine:
    """An engine that rows of the ledger name. Raises `LedgerError`, and `Refusal` where nothing is kept of it."""
    kept = await parts.ledger.engine(message.engine_id, message.generation)
    if kept is None:
        raise Refusal(
            "KVD-NO-ENGINE",
            f"the ledger has no description of engine {message.engine_id!r} generation {message.generation!r}",
            hint="it is kept for engines that were complete when their transfers were reported",
        )
    return kept
