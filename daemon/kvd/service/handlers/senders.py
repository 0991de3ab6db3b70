"""Whose message it is: what only registered clients may send, and what only an engine's scheduler may say."""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.sockets.router import Caller


def registered(daemon: Daemon, caller: Caller) -> Client:
    """The client behind a message. Raises `RequestRefused` where it is none."""
    client = daemon.registry.by_route(caller.route)
    if client is None:
        raise RequestRefused(
            "KVD-NOT-REGISTERED", "the sender is not registered here", hint="register, then send it again"
        )
    return client


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
