"""What an operator asks of a kvd: engines, workers, status."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts
from kvd.wire.reply import Reply, Request


class ListEngines(Request, tag="list_engines", frozen=True, kw_only=True):
    """All engines that this kvd knows, local ones and peers. Answered by `EngineList`.

    ``after`` is the ``more`` of the answer before.
    """

    cards: bool = False
    after: str = ""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    ``state``: ready, partial (ranks missing), gone (seen before, dead), unreachable (a peer's kvd is away).

    ``since`` is Unix time of the last change of state. ``card`` comes only when asked for.
    """

    engine: EngineFacts
    generation: str
    local: bool
    state: str
    ranks: tuple[Rank, ...]
    since: float
    endpoint: Endpoint = Endpoint()
    scheduler: bool = False
    policy: str = ""
    leases: int = 0
    reason: str = ""
    peers: tuple[str, ...] = ()
    card: EngineCard | None = None


class EngineList(Reply, tag="engines", frozen=True, kw_only=True):
    """The engines, local ones first. ``more``: there are further ones; ask again after it."""

    rows: tuple[EngineRow, ...]
    more: str = ""


class ListWorkers(Request, tag="list_workers", frozen=True, kw_only=True):
    """The local workers and schedulers. Answered by `WorkerList`. ``after`` is the ``more`` of the answer before."""

    after: str = ""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One local client.

    ``kind``: worker or scheduler; ``state``: alive, silent (heartbeats missing), gone.
    """

    kind: str
    engine_id: str
    rank: Rank | None
    pid: int
    incarnation: str
    state: str
    registered: float
    heartbeat_age: float
    backend: str = ""
    regions: int = 0
    registered_bytes: int = 0
    reason: str = ""


class WorkerList(Reply, tag="workers", frozen=True, kw_only=True):
    """The local clients, engine by engine. ``more``: there are further ones; ask again after it."""

    rows: tuple[WorkerRow, ...]
    more: str = ""


class GetStatus(Request, tag="get_status", frozen=True, kw_only=True):
    """How this kvd is. Answered by `KvdStatus`."""


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Another kvd. ``state``: connecting, up, down; ``rtt`` in seconds of the last ping."""

    endpoint: Endpoint
    kvd_id: str
    state: str
    rtt: float
    since: float


class PeerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """How a kvd tells other hosts apart: not at all, all but those that share its pair, or by a key for each.

    ``public`` is its own key. ``trusted`` keys are let in; those in ``list_file`` where there is one, and ``error``
    says why that cannot be read now.
    """

    identity: Literal["none", "shared", "per host"] = "none"
    public: str = ""
    trusted: int = 0
    key_file: str = ""
    list_file: str = ""
    error: str = ""


class KvdStatus(Reply, tag="status", frozen=True, kw_only=True):
    """One kvd at one moment. ``counters`` only ever grow; ``gauges`` are values of now.

    ``ledger_away`` says why its ledger cannot be written now, and is empty while it can. ``keys`` None: it has no peer
    socket, or is of an earlier version.
    """

    kvd_id: str
    generation: str
    version: str
    pid: int
    host: str
    started: float
    runtime_dir: str
    endpoint: Endpoint
    counters: dict[str, int]
    gauges: dict[str, float]
    peers: tuple[PeerRow, ...] = ()
    draining: bool = False
    ledger_away: str = ""
    keys: PeerKeys | None = None
