"""Whose message it is: what only registered clients may send, and what only an engine's scheduler may say."""

from __future__ import annotations

from kvd.service.engines.registry import Client
from kvd.service.errors import Refusal
from kvd.service.parts import Parts
from kvd.service.sockets.router import Caller


def registered(parts: Parts, caller: Caller) -> Client:
    """The client behind a message. Raises `Refusal` where it is none."""
    client = parts.registry.by_route(caller.route)
    if client is None:
        raise Refusal(
            "KVD-NOT-REGISTERED", "the sender is not registered here", hint="register, then send it again"
        )
    return client


def scheduler_of(parts: Parts, caller: Caller, engine_id: str, *, final: bool = False) -> Client:
    """The scheduler of that engine, if it is the sender. Raises `Refusal` naming who is, ``final`` where that stays."""
    client = registered(parts, caller)
    if client.kind != "scheduler" or client.engine.engine_id != engine_id:
        raise Refusal(
            "KVD-NOT-OWNER",
            f"{client.name} cannot speak for the scheduler of engine {engine_id!r}",
            hint="an engine's scheduler alone speaks of its leases, requests and misses",
            final=final,
        )
    return client
