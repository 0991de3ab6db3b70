"""What recorded transfers show of the path between two live engines, beside what their geometries say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvctl import daemon
from kvctl.views.topology.document import Finding, Pair
from kvd.topology.rate import Pace, slow_path
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord

if TYPE_CHECKING:
    from kvctl.cli.settings import Settings
    from kvd.geometry.model import EngineGeometry

LOOKED_AT = 32
"""Transfers of a pair that are asked for, newest first."""


def with_measured(settings: Settings, pair: Pair, local: EngineGeometry, remote: EngineGeometry) -> Pair:
    """The pair with a finding more where its transfers between GPUs come through the host.

    kvd is asked only for engines whose memory is on GPUs.
    """
    devices = sorted({region.device for e in (local, remote) for w in e.workers for region in w.regions})
    if not devices or "cpu" in devices:
        return pair
    wanted = ListTransfers(
        engine_id=local.engine_id, peer=remote.engine_id, state="done", mode="pull", limit=LOOKED_AT
    )
    records = [row.record for row in daemon.ask(settings, wanted, TransferList).rows]
    records = [record for record in records if record.local_engine == local.engine_id]
    found = slow_path(map(_pace, records), devices, records[0].backend if records else "")
    if found is None:
        return pair
    finding = Finding(code=found.code, severity=found.severity, message=found.message, hint=found.hint)
    return msgspec.structs.replace(pair, findings=(*pair.findings, finding))


def _pace(record: TransferRecord) -> Pace:
    seconds = record.stages.get("post", 0.0) + record.stages.get("wire", 0.0)
    return Pace(record.bytes, seconds, record.coalesced_descriptors)
