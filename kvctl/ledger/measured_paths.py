"""What recorded transfers show of the path between two live engines, beside what their geometries say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl import daemon
from kvctl.ledger.statistics import posted
from kvd.backends.registry import mover
from kvd.topology.rate import Pace, slow_path
from kvd.wire.transfer import ListTransfers, TransferList

if TYPE_CHECKING:
    from kvctl.cli.settings import Settings
    from kvd.geometry.model import EngineGeometry
    from kvd.topology.findings import Finding

LOOKED_AT = 32
"""Transfers of a pair that are asked for, newest first."""


def measured(settings: Settings, local: EngineGeometry, remote: EngineGeometry) -> tuple[Finding, ...]:
    """A finding where the pair's transfers between GPUs come through the host.

    kvd is asked only for engines whose memory is on GPUs.
    """
    devices = sorted({region.device for e in (local, remote) for w in e.workers for region in w.regions})
    if not devices or "cpu" in devices:
        return ()
    wanted = ListTransfers(
        engine_id=local.engine_id, peer=remote.engine_id, state="done", mode="pull", limit=LOOKED_AT
    )
    records = [row.record for row in daemon.ask(settings, wanted, TransferList).rows]
    records = [record for record in records if record.local_engine == local.engine_id]
    paces = (Pace(record.bytes, posted(record), record.coalesced_descriptors) for record in records)
    found = slow_path(paces, devices, mover(records[0].backend if records else ""))
    return (found,) if found else ()
