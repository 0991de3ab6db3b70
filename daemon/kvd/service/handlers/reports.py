"""Transfers as workers and schedulers report them, and what operators ask of the ledger."""

from __future__ import annotations

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.handlers.senders import client_of, not_registered
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
    """Take records of the sender's own; answered once they are on disk. Raises `LedgerError`, and `RequestRefused`."""
    client = client_of(daemon, caller, message.incarnation, "report transfers of")
    if client is None:
        raise not_registered()
    for record in message.records:
        _check_reporter(client, record)
    engine = daemon.registry.engines.get(client.engine.engine_id)
    generation = engine.generation if engine is not None else ""
    records = tuple(_completed(generation, record) for record in message.records)
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


def _check_reporter(client: Client, record: TransferRecord) -> None:
    """Raise `RequestRefused` for a record of another engine or place, and for what a scheduler cannot know.

    The first record of a transfer at a place is the one that is kept, so another's would keep out the true one.
    """
    place = str(client.rank) if client.rank else SCHEDULER_RANK
    if (record.local_engine, record.local_rank) != (client.engine.engine_id, place):
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{client.name} cannot report a transfer of {record.local_engine}/{record.local_rank}",
            hint="each worker and each scheduler reports its own",
            final=True,
        )
    if client.rank is None and record.state != "miss":
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{client.name} cannot report a transfer that is {record.state}: no load was ordered",
            hint="a scheduler reports misses of its own engine",
            final=True,
        )


def _completed(generation: str, record: TransferRecord) -> TransferRecord:
    """The record with a code of ours, and the generation of the engine that reports it, which it may not know."""
    code = known_code(record.code) if record.state == "miss" else ""
    if code == record.code and record.local_generation:
        return record
    return msgspec.structs.replace(record, code=code, local_generation=record.local_generation or generation)


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
