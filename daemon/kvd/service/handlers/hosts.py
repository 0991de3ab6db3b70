"""Which host or user speaks: a peer's connection is one host's, known by the key with which it was made.

Without keys (a peer socket on loopback) nobody can be told apart, and everybody speaks for every endpoint.
"""

from __future__ import annotations

from kvd.service.daemon import Daemon
from kvd.service.engines.claimant import Claimant, host_claimant
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE, Endpoint


def speaks_for(daemon: Daemon, caller: Caller, endpoint: Endpoint) -> bool:
    """Whether the peer behind a message is the kvd at ``endpoint``, by its key."""
    if daemon.keys is None:
        return True
    return bool(caller.key) and caller.key == daemon.keys.of(endpoint.host, endpoint.port)


def refuse_impostor(daemon: Daemon, caller: Caller, endpoint: Endpoint, what: str) -> None:
    """Raise `RequestRefused` unless the caller is the kvd at ``endpoint``; ``what`` it says is named."""
    if speaks_for(daemon, caller, endpoint):
        return
    daemon.counters["peers.impostors"] += 1
    daemon.events.emit("peer.impostor", str(endpoint), key=caller.key.decode("ascii", "replace"), what=what)
    raise RequestRefused(
        "KVD-NOT-YOUR-ENGINE",
        f"{what} is for the kvd at {endpoint} to say, and this connection has another host's key",
        hint="`kvctl keys show` on that host prints the line that this one is to trust",
        final=True,
    )


def knows_engine(daemon: Daemon, caller: Caller, engine_id: str) -> bool:
    """Whether the caller's host was given the card of an engine here, and uses it still."""
    return daemon.keys is None or daemon.subscribers.uses(caller.key, engine_id)


def claimant_of(daemon: Daemon, caller: Caller, engine_id: str) -> Claimant:
    """The caller, a peer, as a claimant of an engine's leases."""
    return host_claimant(caller.key, knows=knows_engine(daemon, caller, engine_id))


def local_claimant(daemon: Daemon, client: Client, engine_id: str) -> Claimant:
    """A client here as a claimant of an engine's leases; one of another user is as a host that has a key.

    It is a stranger while its engine was not given the card of that engine.
    """
    engine = daemon.registry.engines.get(engine_id)
    if engine is None or engine.uid == client.uid:
        return Claimant(client.incarnation)
    peer = daemon.handshakes.peers.get((HERE, engine_id))
    knows = peer is not None and client.engine.engine_id in peer.users
    return Claimant(client.incarnation, peer=True, knows=knows, stranger=not knows)
