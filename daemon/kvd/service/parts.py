"""The parts of a running daemon, for the functions that answer messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvd.geometry.model import WorkerGeometry
from kvd.service.config import Config
from kvd.service.engines.leases import Leases
from kvd.service.engines.liveness import Liveness
from kvd.service.engines.miss_history import Timelines
from kvd.service.engines.readers import Readers
from kvd.service.engines.registry import Registry
from kvd.service.engines.served_counts import ServedCounts
from kvd.service.ledger.ledger import Ledger
from kvd.service.loop_monitor import Turns
from kvd.service.peers.askers import Askers
from kvd.service.peers.handshakes import Handshakes, Myself
from kvd.service.peers.links import Links
from kvd.service.sockets.events import Events
from kvd.service.sockets.router import Router

Decode = Callable[[bytes], WorkerGeometry]


@dataclass(slots=True)
class Parts:
    """All state of a daemon. ``config`` is replaced by a reload, ``draining`` and ``prepared`` are set once.

    ``pushes_underway`` are messages of pushes that wait for an answer now, with ``push_ids_underway`` block ids.
    """

    config: Config
    myself: Myself
    directory: Path
    decode: Decode
    counters: Counter[str]
    events: Events
    registry: Registry
    liveness: Liveness
    leases: Leases
    readers: Readers
    ledger: Ledger
    links: Links
    handshakes: Handshakes
    local: Router
    peer: Router | None = None
    askers: Askers = field(default_factory=Askers)
    timelines: Timelines = field(default_factory=Timelines)
    served: ServedCounts = field(default_factory=ServedCounts)
    draining: bool = False
    prepared: bool = False
    loop_lag: float = 0.0
    turns: Turns = field(default_factory=Turns)
    pushes_underway: int = 0
    push_ids_underway: int = 0
