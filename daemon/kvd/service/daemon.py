"""The parts of a running daemon, for the functions that answer messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvd.geometry.alike import DocumentChecker
from kvd.service.config import Config
from kvd.service.engines.draining import DrainTable
from kvd.service.engines.leases import LeaseTable
from kvd.service.engines.listed import Listed
from kvd.service.engines.liveness import Liveness
from kvd.service.engines.miss_history import MissHistory
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.engines.readers import Readers
from kvd.service.engines.registry import Registry
from kvd.service.fairness.budget import Budget
from kvd.service.ledger.ledger import Ledger
from kvd.service.loop_monitor import LoopMonitor
from kvd.service.membership.members import Members
from kvd.service.peers.comparer.pool import ComparerPool
from kvd.service.peers.giving import PartsGiven
from kvd.service.peers.handshakes import Handshakes, Myself
from kvd.service.peers.homes import Homes
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.parts import ClientSender
from kvd.service.peers.subscribers import Subscribers
from kvd.service.peers.trust import Keys
from kvd.service.permission import Operators
from kvd.service.prefixes.counts import PrefixCounts
from kvd.service.prefixes.following import Followers
from kvd.service.prefixes.hints import Hints
from kvd.service.slices import Slices
from kvd.service.sockets.events import Events
from kvd.service.sockets.router import Router
from kvd.service.sockets.sockets import Sockets
from kvd.service.tracing.tracing import Tracing


@dataclass(slots=True)
class Daemon:
    """All state of a daemon. ``config`` is replaced by a reload, ``draining`` and ``prepared`` are set once.

    ``slices``, ``hints_told`` and ``prefix_questions`` are for long work: lists for operators, hints for other kvds,
    and whom to ask for a prefix. ``parts_given`` are parts of cards for peers, if there may be peers. ``push_places``
    has the messages of pushes that wait for an answer now. ``engine_changes`` is one more than how often engines came
    up or ended.
    """

    config: Config
    myself: Myself
    directory: Path
    counters: Counter[str]
    events: Events
    registry: Registry
    liveness: Liveness
    leases: LeaseTable
    drains: DrainTable
    readers: Readers
    ledger: Ledger
    links: PeerLinks
    handshakes: Handshakes
    members: Members
    homes: Homes
    parts: ClientSender
    comparers: ComparerPool
    outcomes: OutcomeCounts
    hints: Hints
    followers: Followers
    sockets: Sockets
    local: Router
    peer: Router | None = None
    keys: Keys | None = None
    subscribers: Subscribers = field(default_factory=Subscribers)
    prefix_counts: PrefixCounts = field(default_factory=PrefixCounts)
    miss_history: MissHistory = field(default_factory=MissHistory)
    operators: Operators = field(default_factory=Operators)
    geometries: DocumentChecker = field(default_factory=DocumentChecker)
    slices: Slices = field(default_factory=Slices)
    hints_told: Slices = field(default_factory=Slices)
    prefix_questions: Slices = field(default_factory=Slices)
    listed_for_peers: Listed = field(default_factory=Listed)
    parts_given: PartsGiven | None = None
    tracing: Tracing | None = None
    draining: bool = False
    prepared: bool = False
    engine_changes: int = 1
    loop_lag: float = 0.0
    loop_monitor: LoopMonitor = field(default_factory=LoopMonitor)
    push_places: Budget = field(default_factory=lambda: Budget("messages of pushes", "block ids"))
