"""Which host or user speaks: a peer's connection is one host's, known by the key with which it was made.

Without keys (a peer socket on loopback) nobody can be told apart, and everybody speaks for every endpoint.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.addresses import join_address
from kvd.service.daemon import Daemon
from kvd.service.engines.claimant import Claimant, host_claimant
from kvd.service.engines.local_engine import Client
from kvd.service.errors import RequestRefused
from kvd.service.sockets.router import Caller
from kvd.wire.identity import HERE, Endpoint

ANY_HOST = "*"
"""In ``access.hosts``: operators on every host whose key is let in."""
LONGEST_NAME = 256
"""Characters of a host's name that a refusal repeats: a place in the list of keys may be any word."""


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


def as_operator(daemon: Daemon, caller: Caller, what: str) -> Caller:
    """The peer behind a message as an operator, whose host stands in ``access.hosts``. Raises `RequestRefused`."""
    allowed, names = daemon.config.access.hosts, _names(daemon, caller)
    if ANY_HOST in allowed or not names.keys().isdisjoint(allowed):
        return replace(caller, operator=True)
    # The list is not told, only how long it is: it is nobody's business, and a refusal is to be small.
    host = next(iter(names), "")[:LONGEST_NAME]
    named = f"names {len(allowed)} others" if allowed else "names none"
    raise RequestRefused(
        "KVD-NOT-PERMITTED",
        f"operators on {host or 'other hosts'} may not ask this kvd for {what}: its setting access.hosts {named}",
        hint=f"add {host or repr(ANY_HOST)} to access.hosts in kvd.yaml there, and start that kvd again",
        final=True,
    )


def _names(daemon: Daemon, caller: Caller) -> dict[str, None]:
    """What a caller's host may be called in ``access.hosts``: its places, their hosts, its key.

    One pass over the keys, however many are named there: whoever has a key may ask as often as it likes.
    """
    if daemon.keys is None or not caller.key:
        return {}
    places = [place for place, key in daemon.keys.servers.items() if key == caller.key]
    names = [join_address(host, port) for host, port in places if port]
    return dict.fromkeys((*names, *(host for host, _ in places), caller.key.decode("ascii", "replace")))


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
