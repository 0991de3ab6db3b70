"""Dispatch: which message is answered by which function, on the local socket and on the peer socket."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from kvd.service.daemon import Daemon
from kvd.service.errors import RequestRefused
from kvd.service.handlers import (
    agents,
    caches,
    checksums,
    drains,
    handshake,
    hints,
    hosts,
    leases,
    open_leases,
    orders,
    outcomes,
    parts,
    prefixes,
    pushes,
    queries,
    registration,
    reports,
)
from kvd.service.sockets.router import Caller, Handled, Handler
from kvd.wire.agent import EvictPeer, ListAgents
from kvd.wire.checksum import GetSums
from kvd.wire.drain import DrainEngines
from kvd.wire.frame import kind_of
from kvd.wire.handshake import DescribeEngine, GetPeer, Ping
from kvd.wire.lease import LeaseClaim, LeaseClosed, LeaseOpened, LeaseRelease
from kvd.wire.order import ClearForced, EndLease, ForceMiss, GetForced, ReportForced
from kvd.wire.outcomes import GetOutcomes, ReportOutcomes
from kvd.wire.part import ForWorker, FromWorker, JoinWorker, PartAlive
from kvd.wire.prefix import CheckPrefix, FindPrefix
from kvd.wire.prefixes.cache import FindHolders, ListCaches
from kvd.wire.prefixes.hints import GetHints, TellHints
from kvd.wire.push import PushAnnounce, PushDone, PushKept, PushProgress, PushWithdraw
from kvd.wire.query import GetStatus, ListEngines, ListLeases, ListWorkers
from kvd.wire.registration import Heartbeat, RegisterScheduler, RegisterWorker, Unregister
from kvd.wire.transfer import GetKeptEngine, ListTransfers, ReportTransfers

PUSHES: tuple[type[Any], ...] = (PushAnnounce, PushWithdraw, PushProgress, PushDone)


def local_handlers(daemon: Daemon) -> Mapping[type[Any], Handler]:
    """What workers, schedulers and operators may send."""

    def by_home(handler: Any) -> Handler:
        return partial(parts.by_home, partial(handler, daemon), daemon)

    return {
        RegisterWorker: partial(registration.register_worker, daemon),
        RegisterScheduler: partial(registration.register_scheduler, daemon),
        Heartbeat: partial(registration.heartbeat, daemon),
        Unregister: partial(registration.unregister, daemon),
        GetPeer: by_home(handshake.get_peer),
        LeaseOpened: partial(leases.lease_opened, daemon),
        LeaseClosed: partial(leases.lease_closed, daemon),
        LeaseClaim: partial(leases.lease_claim, daemon),
        LeaseRelease: partial(leases.lease_release, daemon),
        **dict.fromkeys(PUSHES, by_home(pushes.from_worker)),
        PushKept: partial(pushes.kept, daemon),
        GetSums: by_home(checksums.from_worker),
        FindPrefix: partial(prefixes.find_prefix, daemon),
        CheckPrefix: partial(prefixes.check_prefix, daemon),
        TellHints: partial(hints.tell_hints, daemon),
        DrainEngines: partial(drains.drain_engines, daemon),
        ForceMiss: partial(orders.force_miss, daemon),
        ClearForced: partial(orders.clear_forced, daemon),
        ReportForced: partial(orders.report_forced, daemon),
        GetForced: partial(orders.get_forced, daemon),
        ReportTransfers: partial(reports.report_transfers, daemon),
        ListTransfers: partial(reports.list_transfers, daemon),
        GetKeptEngine: partial(reports.get_kept_engine, daemon),
        ListEngines: partial(queries.list_engines, daemon),
        ListWorkers: partial(queries.list_workers, daemon),
        ListLeases: partial(open_leases.list_leases, daemon),
        EndLease: partial(open_leases.end_lease, daemon),
        ListAgents: partial(agents.list_agents, daemon),
        EvictPeer: partial(agents.evict_peer, daemon),
        ListCaches: partial(caches.list_caches, daemon),
        FindHolders: partial(caches.find_holders, daemon),
        GetStatus: lambda *_: queries.status(daemon),
        ReportOutcomes: partial(outcomes.report_outcomes, daemon),
        GetOutcomes: partial(outcomes.get_outcomes, daemon),
    }


def peer_handlers(daemon: Daemon) -> Mapping[type[Any], Handler]:
    """What other kvds may send, and operators on other hosts. What it is about is ours, or nobody's.

    Nothing is passed on from here, but between the kvds of one engine.
    """
    handlers: Mapping[type[Any], Handler] = {
        DescribeEngine: partial(handshake.describe_engine, daemon),
        Ping: partial(handshake.ping, daemon),
        LeaseClaim: partial(leases.peer_lease_claim, daemon),
        LeaseRelease: partial(leases.peer_lease_release, daemon),
        **dict.fromkeys(PUSHES, partial(pushes.from_peer, daemon)),
        GetSums: partial(checksums.from_peer, daemon),
        FindPrefix: partial(prefixes.peer_find_prefix, daemon),
        CheckPrefix: partial(prefixes.peer_check_prefix, daemon),
        GetHints: partial(hints.get_hints, daemon),
        ListEngines: partial(queries.engines_here, daemon),
        GetOutcomes: partial(outcomes.from_peer, daemon),
        JoinWorker: partial(parts.join_worker, daemon),
        PartAlive: partial(parts.part_alive, daemon),
        FromWorker: partial(parts.from_worker, daemon),
        ForWorker: partial(parts.for_worker, daemon),
        ListWorkers: _of_operator(daemon, queries.list_workers),
        GetStatus: _of_operator(daemon, lambda *_: queries.status(daemon)),
        ListTransfers: _of_operator(daemon, reports.list_transfers),
        ListLeases: _of_operator(daemon, open_leases.list_leases),
        ListAgents: _of_operator(daemon, agents.list_agents),
        ListCaches: _of_operator(daemon, caches.list_caches),
        FindHolders: _of_operator(daemon, caches.find_holders),
        GetKeptEngine: _of_operator(daemon, reports.get_kept_engine),
    }
    return {kind: partial(_if_trusted, daemon, handler) for kind, handler in handlers.items()}


def _of_operator(daemon: Daemon, handler: Any) -> Handler:
    """An operator's question, from a host that ``access.hosts`` names. Nothing that changes anything is one."""

    def handle(caller: Caller, message: Any) -> Handled | Awaitable[Handled]:
        answered: Handled | Awaitable[Handled] = handler(
            daemon, hosts.as_operator(daemon, caller, kind_of(message)), message
        )
        return answered

    return handle


def _if_trusted(
    daemon: Daemon, handler: Handler, caller: Caller, message: Any
) -> Handled | Awaitable[Handled]:
    """Handle it, unless the caller's key was revoked since its connection was made. Raises `RequestRefused`."""
    if daemon.keys is not None and caller.key not in daemon.keys.authorised:
        raise RequestRefused(
            "KVD-KEY-REVOKED",
            f"the key {caller.key.decode('ascii', 'replace')!r} is not trusted here any more",
            hint="`kvctl keys trust` on this host lets it in again",
            final=True,
        )
    return handler(caller, message)
