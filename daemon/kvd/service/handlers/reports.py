"""Transfers as workers and schedulers report them, and what operators ask of the ledger."""

from __future__ import annotations

import msgspec

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.handlers.senders import client_of, not_registered
from kvd.service.handlers.sight import own_engines, sight_of
from kvd.service.ledger.jobs import LedgerClient
from kvd.service.ledger.query import Own
from kvd.service.ledger.store import named_engines
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
    TransferList,
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
    records = tuple(_completed(generation, client.uid, record) for record in message.records)
    for record in await daemon.ledger.append(
        records, _unknown_engines(daemon, records), _ledger_client(caller)
    ):
        _count(daemon, record)
        # One that was forgotten meanwhile would be counted for ever.
        if (
            record.prefix
            and engine is not None
            and daemon.registry.engines.get(record.local_engine) is engine
        ):
            daemon.prefix_counts.took(record, first=engine.ranks[:1] == [client.rank])
    return Ok()


async def list_transfers(daemon: Daemon, caller: Caller, message: ListTransfers) -> TransferList:
    """Rows of the ledger. Raises `LedgerError`, and `RequestRefused` for a question that takes too long."""
    sight = await sight_of(daemon, caller)
    own = None if sight.everything else Own(sight.uid, own_engines(daemon, sight))
    return await daemon.ledger.select(message, _ledger_client(caller), own)


def _ledger_client(caller: Caller) -> LedgerClient:
    return LedgerClient(caller.route, caller.uid, caller.key)


def _count(daemon: Daemon, record: TransferRecord) -> None:
    """A record that is new in the ledger."""
    if daemon.tracing is not None and record.traceparent:
        daemon.tracing.load_ended(record)
    if record.checksum.state:
        daemon.counters[f"checksums.{record.checksum.state}"] += 1
    if record.state == "done":
        daemon.counters["transfers.done"] += 1
        daemon.counters["transfers.bytes"] += record.bytes
        return
    daemon.counters[f"misses.{record.code}"] += 1
    daemon.events.emit(
        "transfer.miss", record.request_id, local=record.local_engine, rank=record.local_rank,
        remote=record.remote_engine, code=record.code, cause=record.cause,
    )  # fmt: skip


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


def _completed(generation: str, uid: int, record: TransferRecord) -> TransferRecord:
    """The record with a code of ours, whose it is, and its engine's generation, which the reporter may not know."""
    code = known_code(record.code) if record.state == "miss" else ""
    return msgspec.structs.replace(
        record, code=code, uid=uid, local_generation=record.local_generation or generation
    )


def _unknown_engines(daemon: Daemon, records: tuple[TransferRecord, ...]) -> list[EngineCard]:
    """Cards of engines that these records name and the ledger does not have, as far as they are known here."""
    wanted = named_engines(records) - daemon.ledger.known
    found: dict[tuple[str, str], EngineCard] = {}
    for key in wanted:
        local = daemon.registry.ready(key[0])
        if local is not None and local.generation == key[1]:
            found[key] = local.card()
    for key in wanted.difference(found):
        for peer in daemon.handshakes.peers.named(key[0]).values():
            if peer.card.generation == key[1] and peer.card.workers:
                found[key] = peer.card
    return list(found.values())


async def get_kept_engine(daemon: Daemon, caller: Caller, message: GetKeptEngine) -> KeptEngine:
    """An engine that rows of the ledger name. Raises `LedgerError`, and `RequestRefused` for one it does not have."""
    sight = await sight_of(daemon, caller)
    if not sight.everything and not _known_to(daemon, own_engines(daemon, sight), message.engine_id):
        raise RequestRefused(
            "KVD-NO-ENGINE",
            f"engine {message.engine_id!r} is not of uid {caller.uid}, and no peer of an engine that is",
            hint="root, the user of kvd and members of orders.group see all engines",
        )
    kept = await daemon.ledger.engine(message.engine_id, message.generation, _ledger_client(caller))
    if kept is None:
        raise RequestRefused(
            "KVD-NO-ENGINE",
            f"the ledger has no description of engine {message.engine_id!r} generation {message.generation!r}",
            hint="it is kept for engines that were complete when their transfers were reported",
        )
    return kept


def _known_to(daemon: Daemon, own: frozenset[str], engine_id: str) -> bool:
    """Whether an engine is one of these, or a peer that one of them was given."""
    return engine_id in own or any(
        not own.isdisjoint(peer.friends) for peer in daemon.handshakes.peers.named(engine_id).values()
    )
