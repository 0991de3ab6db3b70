"""Whose message it is: what only registered clients may send, and what only an engine's scheduler may say."""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client, who
from kvd.service.errors import RequestRefused
from kvd.service.sockets.router import Caller


def registered(daemon: Daemon, caller: Caller) -> Client:
    """The client behind a message. Raises `RequestRefused` where it is none."""
    client = daemon.registry.by_route(caller.route)
    if client is None:
        raise not_registered()
    return client


def not_registered() -> RequestRefused:
    """The sender is none of the clients."""
    return RequestRefused(
        "KVD-NOT-REGISTERED", "the sender is not registered here", hint="register, then send it again"
    )


def client_of(daemon: Daemon, caller: Caller, incarnation: str, what: str) -> Client | None:
    """The client of that incarnation, also one that is gone, if it is the caller; None where none is known.

    Raises `RequestRefused`, with ``what`` the caller cannot do, where another process has that incarnation.
    """
    client = daemon.registry.clients.get(incarnation)
    if client is not None and not client.is_of(caller.uid, caller.pid):
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{who(caller.uid, caller.pid)} cannot {what} {client.name}, which is {client.owner}",
            hint="each worker and each scheduler speaks for itself",
            final=True,
        )
    return client


def refuse_other_user(daemon: Daemon, caller: Caller, engine_id: str, what: str) -> None:
    """Raise `RequestRefused`, with ``what`` the caller cannot do, where an engine that lives is another user's."""
    engine = daemon.registry.engines.get(engine_id)
    if engine is not None and engine.alive and engine.uid != caller.uid:
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{who(caller.uid, caller.pid)} cannot {what} engine {engine_id!r}, which is uid {engine.uid}'s",
            hint="each engine asks for itself",
            final=True,
        )


def scheduler_of(daemon: Daemon, caller: Caller, engine_id: str, *, final: bool = False) -> Client:
    """The scheduler of that engine, if it is the sender. Raises `RequestRefused` naming who is."""
    client = registered(daemon, caller)
    if client.kind != "scheduler" or client.engine.engine_id != engine_id:
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"{client.name} cannot speak for the scheduler of engine {engine_id!r}",
            hint="an engine's scheduler alone speaks of its leases, requests and misses",
            final=final,
        )
    return client
