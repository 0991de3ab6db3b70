"""Which client may take which place: an incarnation is one process's, an engine one user's, a place one client's."""

from __future__ import annotations

from kvd.service.engines.contradictions import contradiction
from kvd.service.engines.local_engine import Client, LocalEngine
from kvd.service.errors import RequestRefused
from kvd.wire.identity import HERE, Endpoint


def refuse_another(known: Client, client: Client) -> None:
    """Raise `RequestRefused` where a known incarnation is another process's, or has another place.

    Generations are made of incarnations: who took one that has ended would be taken for it by whoever remembers it.
    """
    if not client.is_of(known.uid, known.process, known.at) and not (
        known.state == "gone" and _may_be_back(known, client)
    ):
        has = "is" if known.state != "gone" else "was"
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"incarnation {client.incarnation} {has} that of {known.name}, {known.owner}: {client.owner} cannot"
            f" register {client.name} with it",
            hint="each worker and each scheduler makes an incarnation of its own when it starts",
        )
    if known.state != "gone" and known.name != client.name:
        raise RequestRefused(
            "KVD-BAD-CARD",
            f"incarnation {client.incarnation} is {known.name}, and registers as {client.name}: it is one client",
            hint="each worker and each scheduler makes an incarnation of its own when it starts",
        )


def _may_be_back(known: Client, client: Client) -> bool:
    """Of one user and one host, and not known to have ended."""
    return known.uid == client.uid and known.at == client.at and not known.ended


def refuse_stranger(engine: LocalEngine, client: Client) -> None:
    """Raise `RequestRefused` where an engine that lives is another user's.

    Root is no exception: the processes of an engine run as one user, and who means to stop it can stop those.
    """
    if engine.uid != client.uid:
        one = next(iter(engine.clients))
        raise RequestRefused(
            "KVD-NOT-OWNER",
            f"engine {client.engine.engine_id!r} is uid {engine.uid}'s ({one.name} is {one.owner}):"
            f" {client.owner} cannot register {client.name}",
            hint="give each engine its own engine_id, and run all its processes as one user",
        )


def refuse_conflict(engine: LocalEngine, holder: Client | None, client: Client) -> None:
    """Raise `RequestRefused` where a place is held by a process that is alive, or where facts disagree."""
    if (
        holder
        and holder.state == "alive"
        and holder.incarnation != client.incarnation
        and (holder.at, holder.pid) != (client.at, client.pid)
    ):
        raise RequestRefused(
            "KVD-RANK-TAKEN",
            f"{client.name} of process {client.pid} (incarnation {client.incarnation}): that place is held by process"
            f" {holder.pid}{_at(holder)} (incarnation {holder.incarnation}), which is alive",
            hint="give each engine its own engine_id, or stop the other process; `kvctl workers` lists both",
        )
    other = next((c for c in engine.clients if c is not holder), None)
    if other is not None and client.home != engine.home:
        raise RequestRefused(
            "KVD-ENGINE-CONFLICT",
            f"{client.name} says that its engine is {_home(client.home)}, but {other.name} that it is"
            f" {_home(engine.home)}",
            hint="give all processes of an engine the same home, and each engine its own engine_id",
        )
    if other is not None and (found := contradiction(engine.facts, client.engine)) is not None:
        name, here, there = found
        raise RequestRefused(
            "KVD-ENGINE-CONFLICT",
            f"{client.name} says {name} is {there!r}, but {other.name} of the same engine says {here!r}",
            hint="all workers of one engine_id must come from one engine: give the other one its own id",
        )


def _at(client: Client) -> str:
    return f" at the kvd at {client.at}" if client.at is not None else ""


def _home(home: Endpoint | None) -> str:
    if home is None:
        return "on this host alone"
    return "on several hosts, with its scheduler at " + ("this kvd" if home == HERE else f"the kvd at {home}")
