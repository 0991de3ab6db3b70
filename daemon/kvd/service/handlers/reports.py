"""Transfers as workers and schedulers report them, and what operators ask of the ledger."""

from __future__ import annotations

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.errors import RequestRefused
from kvd.service.handlers.senders import scheduler_of
from kvd.service.ledger.store import named_engines
from kvd.service.sockets.router import Caller
from kvd.wire.identity import EngineCard
from kvd.wire.miss import known_code
from kvd.wire.reply import Ok
from kvd.wire.transfer import (
    SCHEDULER_RANK,
    GetKeptEngine,
    KeptEngine,
    ReportTransfers,
    TransferRecord,
)


async def report_transfers(daemon: Daemon, caller: Caller, message: ReportTransfers) -> Ok:
    """Take records; answered once they are on disk. Raises `LedgerError`, and `RequestRefused`."""
    for record in message.records:
        if record.local_rank == SCHEDULER_RANK:
            _check_scheduler(daemon, caller, record)
    records = tuple(_completed(daemon, message.incarnation, record) for record in message.records)
    for record in await daemon.ledger.append(records, _unknown_engines(daemon, records)):
        if record.checksum.state:
            daemon.counters[f"checksums.{record.checksum.state}"] += 1
        if record.state == "done":
            daemon.counters["transfers.done"] += 1
            daemon.counters["transfers.bytes"] += record.bytes
        else:
            daemon.counters[f"misses.{record.code}"] += 1
            daemon.events.emit(
                "transfer.miss", record.request_id, local=record.local_engine, rank=record.local_rank,
                remote=record.remote_engine, code=record.code, cause=record.cause,
            )  # fmt: skip
    return Ok()


def _check_scheduler(daemon: Daemon, caller: Caller, record: TransferRecord) -> None:
    """Raise `RequestRefused` for what only an engine's scheduler may report, and for what it cannot know."""
    client = scheduler_of(daemon, caller, record.local_engine, final=True)
    if record.state != "miss":
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{client.name} cannot report a transfer that is {record.state}: no load was ordered",
            hint="a scheduler reports misses of its own engine",
            final=True,
        )


def _completed(daemon: Daemon, incarnation: str, record: TransferRecord) -> TransferRecord:
    """The record with a code of ours, and the generation of the engine that reports it, which it may not know."""
    code = known_code(record.code) if record.state == "miss" else ""
    if code != record.code:
        record = msgspec.structs.replace(record, code=code)
    client = daemon.registry.clients.get(incarnation)
    if record.local_generation or client is None or client.engine.engine_id != record.local_engine:
        return record
    generation = daemon.registry.engines[record.local_engine].generation
    return msgspec.structs.replace(record, local_generation=generation)


def _unknown_engines(daemon: Daemon, records: tuple[TransferRecord, ...]) -> list[EngineCard]:
    """Cards of engines that these records name and the ledger does not have, as far as they are known here."""
    found = []
    for engine_id, generation in named_engines(records) - daemon.ledger.known:
        local = daemon.registry.ready(engine_id)
        if local is not None and local.generation == generation:
            found.append(local.card())
            continue
        cards = (peer.card for (_, peer_id), peer in daemon.handshakes.peers.items() if peer_id == engine_id)
        found += [card for card in cards if card.generation == generation][:1]
    return found


async def get_kept_engine(daemon: Daemon, _caller: Caller, message: GetKeptEngine) -> KeptEngine:
    """An engine that rows of the ledger name. Raises `LedgerError`, and `RequestRefused` for one it does not have."""
    kept = await daemon.ledger.engine(message.engine_id, message.generation)
    if kept is None:
        raise RequestRefused(
            "KVD-NO-ENGINE",
            f"the ledger has no description of engine {message.engine_id!r} generation {message.generation!r}",
            hint="it is kept for engines that were complete when their transfers were reported",
        )
    return kept
