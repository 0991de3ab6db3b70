"""What kvd's ledger says of the loads of one decoder, as times of the router's clock."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from benchmarks.gpu.fleet import Pair
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord

LEDGER_SECONDS = 3.0
PAGE = 500


def newest(pair: Pair) -> int:
    """The ledger number of this decoder's last record, 0 where there is none."""
    answer = pair.hosts[1].ask(ListTransfers(engine_id=pair.ids[1], limit=1))
    return answer.rows[0].seq if isinstance(answer, TransferList) and answer.rows else 0


def loads_since(pair: Pair, after: int, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """The records after that number, by the prefiller's request, once all of these are there or time is over.

    ``moments`` are time.monotonic() of this host, which is why this is asked soon: the ledger's clock is Unix time.
    """
    until = time.monotonic() + LEDGER_SECONDS
    while True:
        found = {record.remote_request_id: record for record in _records(pair, after)}
        if found.keys() >= set(names) or time.monotonic() > until:
            break
        time.sleep(0.05)
    offset = time.time() - time.monotonic()
    return {name: _fields(record, offset) for name, record in found.items()}


def _records(pair: Pair, after: int) -> list[TransferRecord]:
    found: list[TransferRecord] = []
    before = 0
    while True:
        query = ListTransfers(engine_id=pair.ids[1], after=after, before=before, limit=PAGE)
        answer = pair.hosts[1].ask(query)
        if not isinstance(answer, TransferList):
            return found
        found += [row.record for row in answer.rows]
        if not answer.more or not answer.rows:
            return found
        before = answer.rows[-1].seq


def _fields(record: TransferRecord, offset: float) -> dict[str, Any]:
    return {
        "state": record.state,
        "cause": record.cause,
        "backend": record.backend,
        "mode": record.mode,
        "bytes": record.bytes,
        "copies": record.coalesced_descriptors,
        "planning": record.stages.get("plan", 0.0),
        "moments": {
            name: record.started + at - offset for name, at in {**record.moments, "received": 0.0}.items()
        },
    }
