"""Puts the daemon together, runs it on one event loop, and takes it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.service import key_changes, metrics
from kvd.service.config import Config, endpoint
from kvd.service.daemon import Daemon
from kvd.service.engines.draining import DrainTable
from kvd.service.engines.leases import LeaseTable
from kvd.service.engines.liveness import Liveness
from kvd.service.engines.outcome_counts import OutcomeCounts
from kvd.service.engines.readers import Readers
from kvd.service.engines.registry import Registry
from kvd.service.errors import ConfigError, LedgerError, StartError
from kvd.service.freed_memory import give_back
from kvd.service.handlers import dispatch, leases, outcomes, queries
from kvd.service.ledger.ledger import Ledger
from kvd.service.log import writers
from kvd.service.loop_monitor import LoopMonitor
from kvd.service.membership import sources
from kvd.service.membership.members import Members
from kvd.service.notify import Notifier
from kvd.service.peers import trust
from kvd.service.peers.comparer.pool import ComparerPool
from kvd.service.peers.compatibility import CompatibilityCache
from kvd.service.peers.discovery import discover
from kvd.service.peers.giving import PartsGiven
from kvd.service.peers.handshakes import Handshakes, Myself
from kvd.service.peers.homes import Homes
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.parts import ClientSender
from kvd.service.peers.trust import Keys
from kvd.service.prefixes.following import Followers
from kvd.service.prefixes.hints import Hints
from kvd.service.registry_wiring import RegistryWiring
from kvd.service.reload import reloading
from kvd.service.runtime_directory import RuntimeDirectory, hold
from kvd.service.self_check import SelfCheck
from kvd.service.sockets import bind
from kvd.service.sockets.dialling import Dialler
from kvd.service.sockets.events import Events
from kvd.service.sockets.router import Router
from kvd.service.sockets.sockets import Sockets
from kvd.service.tracing import settings as tracing
from kvd.service.tracing.begin import begin as begin_tracing
from kvd.service.tracing.tracing import Tracing
from kvd.wire.handshake import Ping
from kvd.wire.identity import Endpoint
from kvd.wire.names import EVENTS_NAME, SOCKET_NAME

log = logging.getLogger(__name__)

LEDGER_NAME = "ledger.sqlite3"
LAG_SECONDS = 0.1
COLLECT = (700, 10, 40)
"""When garbage in circles is looked for (`gc.set_threshold`): among all objects only after some 280,000 new ones, since
100,000 objects take 50 ms."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """The sockets that are bound and served, and what stands behind them; ``at`` is the peer socket's host and port."""

    counters: Counter[str]
    sockets: Sockets
    events: Events
    local: Router
    peer: Router | None
    at: tuple[str, int] | None


async def run_daemon(
    config: Config, reload: Callable[[], Config], notifier: Notifier, monitor: LoopMonitor
) -> None:
    """Run a daemon until SIGTERM or SIGINT. ``reload`` gives new settings at SIGHUP, ``monitor`` is that of the loop.

    Raises `StartError` or `ConfigError` where it cannot begin.
    """
    stop = asyncio.Event()
    async with _running(config) as (daemon, held, tasks):
        daemon.loop_monitor = monitor
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        _on_signals(loop, stop, told.set)
        tasks.append(loop.create_task(reloading(daemon, told, reload, notifier)))
        where = daemon.directory / SOCKET_NAME
        peers = f", peers at {daemon.myself.endpoint}" if daemon.peer else ""
        log.info(
            "serving %s%s as %s generation %s", where, peers, daemon.myself.kvd_id, daemon.myself.generation
        )
        if daemon.peer is not None and (given_up := trust.gives_up(daemon.keys)):
            log.log(logging.WARNING if daemon.keys else logging.INFO, "%s", given_up)
        notifier.ready(f"serving {where}{peers}")
        heart = loop.create_task(_measure_lag(daemon))
        check = SelfCheck(held, notifier, lambda: [writer.thread for writer in writers()])
        with check.running():
            await _until(stop, [*tasks, heart])
        daemon.draining = True
        notifier.stopping()
        log.info(
            "stopping: %d requests in flight, %g s for them", daemon.local.busy, daemon.config.drain_seconds
        )
        await _drain(daemon)
        heart.cancel()


def checked(config: Config) -> Keys | None:
    """The keys that the settings name. Raises `ConfigError` for settings with which kvd does not start."""
    keys = trust.load(config.peer.curve)
    sources.check(config)
    tracing.check(config.tracing)
    if config.peer.listen:
        listen = endpoint(config.peer.listen, "peer.listen")
        trust.refuse_open_bind(listen[0], keys)
        _advertised(config, listen)
    return keys


@contextlib.asynccontextmanager
async def _running(
    config: Config,
) -> AsyncIterator[tuple[Daemon, RuntimeDirectory, list[asyncio.Task[None]]]]:
    keys = checked(config)
    directory = config.directory
    os.umask(0o027)
    async with contextlib.AsyncExitStack() as stack:
        held = stack.enter_context(hold(directory))
        bound = _bind(config, directory, keys, stack)
        held.note_sockets()
        myself = _myself(config, bound.at)
        ledger = Ledger(config.state_directory / LEDGER_NAME, config.ledger, directory)
        stack.callback(ledger.close, config.drain_seconds)
        await ledger.begun()
        daemon = _assemble(config, myself, keys, bound, ledger)
        stack.callback(daemon.liveness.close)
        stack.callback(daemon.leases.close)
        stack.callback(daemon.drains.close)
        stack.push_async_callback(daemon.links.close)
        stack.push_async_callback(daemon.followers.close)
        stack.push_async_callback(daemon.comparers.close)
        stack.push_async_callback(daemon.readers.close)
        stack.push_async_callback(daemon.homes.close)
        stack.push_async_callback(daemon.parts.close)
        if config.tracing.endpoint:
            daemon.tracing = Tracing(config.tracing, daemon.counters)
            daemon.leases.on_closed = daemon.tracing.lease_ended
            stack.callback(begin_tracing(daemon.tracing, myself.kvd_id, myself.host))
        if config.metrics.listen:
            server = await _metrics(config, daemon)
            stack.callback(server.close)
        work: list[Coroutine[Any, Any, None]] = [
            bound.sockets.run(), daemon.liveness.run(), daemon.links.prune(), _forget(daemon),
            ledger.watch(), _prepare(daemon), give_back(daemon.counters),
        ]  # fmt: skip
        work += [key_changes.follow(daemon, keys)] if keys is not None else []
        key = keys.public.decode() if keys is not None else ""
        me = sources.Ourselves(
            bound.at or ("", 0),
            myself.endpoint,
            myself.kvd_id,
            myself.generation,
            key,
            daemon.links.dialler.resolver,
        )
        work.append(daemon.members.run(sources.source_of(config, me)))
        tasks = [asyncio.get_running_loop().create_task(w) for w in work]
        stack.push_async_callback(_cancel, tasks)
        yield daemon, held, tasks


async def _prepare(daemon: Daemon) -> None:
    """Start what compares engines, before somebody waits for it."""
    await daemon.comparers.start()
    gc.freeze()  # else each full collection looks at all that was imported: 12 ms in which nobody is answered
    gc.set_threshold(*COLLECT)
    daemon.prepared = True
    await daemon.comparers.keep_trying()


def _bind(config: Config, directory: Path, keys: Keys | None, stack: contextlib.AsyncExitStack) -> _Bound:
    counters: Counter[str] = Counter()
    sockets = Sockets(counters)
    stack.callback(sockets.close)
    modes = {
        SOCKET_NAME: 0o660,
        EVENTS_NAME: 0o600 if config.access.read == "own" else 0o660,
    }  # events are of all
    listening = {name: bind.bind_unix(directory / name, mode) for name, mode in modes.items()}
    for name in listening:
        stack.callback((directory / name).unlink, missing_ok=True)
    local = Router("local", counters, config.local.queue)
    sockets.serve_local(listening[SOCKET_NAME], local, config)
    events = Events(sockets.serve_events(listening[EVENTS_NAME]), counters)
    peer, at = None, None
    if config.peer.listen:
        host, port = endpoint(config.peer.listen, "peer.listen")
        peer = Router("peer", counters, config.peer.queue)
        reached, at = bind.bind_tcp(host, port)
        sockets.serve_peers(reached, peer, config, trust.mechanism_of(keys))
    return _Bound(counters, sockets, events, local, peer, at)


def _assemble(config: Config, myself: Myself, keys: Keys | None, bound: _Bound, ledger: Ledger) -> Daemon:
    counters, events, router = bound.counters, bound.events, bound.local
    registry = Registry(events, myself.started + config.liveness.settle_seconds)
    counts = OutcomeCounts()
    ping = Ping(kvd_id=myself.kvd_id, kvd_generation=myself.generation, told=True)
    comparers = ComparerPool(counters)
    table = LeaseTable(config.leases, events, counts, router.send, router.ask)
    links = PeerLinks(
        Dialler(bound.sockets.shared, config.peer.max_message_bytes),
        config.peer,
        keys,
        events,
        ping,
        bound.sockets.counts.links,
        myself.endpoint,
    )
    parts = ClientSender(registry, router, links, counters)
    handshakes = Handshakes(
        myself, registry, links, events, parts.send, CompatibilityCache(comparers.turn, counters), config.peer,
    )  # fmt: skip
    hints = Hints(counters)
    links.listener = handshakes
    links.written = frozenset(Endpoint(*endpoint(text, "peer.connect")) for text in config.peer.connect)
    daemon = Daemon(
        config=config,
        myself=myself,
        directory=config.directory,
        counters=counters,
        events=events,
        registry=registry,
        liveness=Liveness(registry, config.liveness),
        leases=table,
        drains=DrainTable(table),
        readers=Readers(lambda message, sender: leases.release(daemon, message, sender), counters),
        ledger=ledger,
        links=links,
        handshakes=handshakes,
        members=Members(
            config.membership.source,
            links,
            lambda at, looking: discover(at, links, handshakes, registry, looking),
            myself.endpoint,
            counters,
        ),
        homes=Homes(myself.endpoint, registry, links, events, handshakes.located),
        parts=parts,
        comparers=comparers,
        outcomes=counts,
        hints=hints,
        followers=Followers(links, hints, handshakes.peers, counters),
        local=router,
        sockets=bound.sockets,
        peer=bound.peer,
        keys=keys,
    )
    registry.watcher = RegistryWiring(daemon)
    daemon.local.handlers = dispatch.local_handlers(daemon)
    if daemon.peer is not None:
        daemon.peer.handlers = dispatch.peer_handlers(daemon)
        daemon.parts_given = PartsGiven(daemon.peer.unsent)
    return daemon


def _myself(config: Config, bound: tuple[str, int] | None) -> Myself:
    host = socket.gethostname()
    at = _advertised(config, bound) if bound is not None else Endpoint()
    name = hashlib.sha256(f"{host}:{config.directory}".encode()).hexdigest()[:6]
    return Myself(f"{host}-{name}", uuid.uuid4().hex[:16], host, at, time.monotonic(), time.time())


def _advertised(config: Config, bound: tuple[str, int]) -> Endpoint:
    """Where peers are told that this kvd is."""
    advertised = endpoint(config.peer.advertise, "peer.advertise") if config.peer.advertise else bound
    if advertised[0] in ("0.0.0.0", "::"):  # noqa: S104 (a wildcard is no address that a peer could use)
        raise ConfigError(
            f"peer.listen is on {bound[0]}, which is no address that peers can be told",
            hint="set peer.advertise to the address under which other hosts reach this one",
        )
    return Endpoint(advertised[0], advertised[1] or bound[1])


async def _metrics(config: Config, daemon: Daemon) -> asyncio.Server:
    host, port = endpoint(config.metrics.listen, "metrics.listen")

    async def now() -> metrics.Told:
        served = await outcomes.totals(daemon)
        engines, prefixes = outcomes.engines_told(daemon), outcomes.prefixes_told(daemon)
        return metrics.Told(queries.status(daemon), served, engines, prefixes)

    try:
        return await metrics.listen(host, port, now)
    except OSError as error:
        raise StartError(
            f"metrics.listen: cannot listen on {config.metrics.listen}: {error.strerror}",
            hint="see who has it: `ss -tlp`",
        ) from None


def _on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, reload: Callable[[], None]) -> None:
    def end() -> None:
        if stop.is_set():
            log.warning("told to stop a second time: stopping now")
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, reload)


async def _until(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    stopped = asyncio.get_running_loop().create_task(stop.wait())
    done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for task in done - {stopped}:
        if not task.cancelled() and (error := task.exception()):
            raise error  # a part that died must not leave a daemon that looks alive: systemd starts a new one


async def _measure_lag(daemon: Daemon) -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(LAG_SECONDS)
        daemon.loop_lag = max(0.0, time.monotonic() - began - LAG_SECONDS)


async def _forget(daemon: Daemon) -> None:
    while True:
        await asyncio.sleep(1.0)
        daemon.handshakes.forget(time.time() - daemon.config.liveness.remember_seconds)


async def _drain(daemon: Daemon) -> None:
    daemon.hints.close()
    for router in (daemon.local, daemon.peer):
        if router is not None:
            with contextlib.suppress(LedgerError):
                await router.finish(daemon.config.drain_seconds)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
