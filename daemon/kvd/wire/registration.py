"""Registration: workers and schedulers tell their kvd who they are, and keep telling it.

Level-triggered: a client keeps its own card and sends it again whenever kvd's generation in a reply is not
the one it registered with. kvd needs to remember nothing across restarts.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvd.wire.identity import Endpoint, EngineFacts, HostName, LeaseKey, ReaderId, Secretive, WorkerCard
from kvd.wire.limits import (
    MOST_LEASES_HELD,
    Count,
    Id,
    Incarnation,
    Port,
    Seconds,
    Secret,
    TraceParent,
    Whole,
)
from kvd.wire.locality import Locality
from kvd.wire.reply import Reply, Request


class RegisterWorker(Request, tag="register_worker", frozen=True):
    """A worker presents its card. ``parts``: it takes cards of peers in parts. Answered by `Registered`.

    ``outlines``: it takes cards of peers in outline (`kvd.wire.handshake.CardOutline`).

    ``packed``: the card's geometry is what `kvd.geometry.packing.pack` made of it. A kvd that does not know this
    refuses it with KVD-GEOMETRY-BAD, since a packed document is no JSON, and is then presented the card as it is.

    ``home``: the engine's workers are on several hosts, and its scheduler is at that kvd (`kvd.wire.part`); port 0 is
    that of the kvd that is asked, no host is that kvd itself. None: all of the engine is at the kvd that is asked.

    ``locality``: where the worker stands in its host. It stays at this kvd, and is for people.
    """

    card: WorkerCard
    parts: bool = False
    packed: bool = False
    home: Endpoint | None = None
    locality: Locality | None = None
    outlines: bool = False


class OpenLease(msgspec.Struct, frozen=True):
    """A lease as its owner, the prefiller's scheduler, holds it.

    ``seconds`` remain at the time of sending. ``opening`` numbers what its owner ever opened, so that a message that
    comes after the lease's end is told from another lease of that request id; 0: its owner numbers nothing.
    ``traceparent`` is of the request that was prefilled.
    """

    request_id: Id
    seconds: Seconds
    blocks: Count = 0
    opening: Count = 0
    traceparent: TraceParent = ""


class OpenReader(msgspec.Struct, frozen=True):
    """A claim on a lease as its maker, the decoder's scheduler, holds it. It reads for ``seconds`` at most."""

    key: LeaseKey
    reader: ReaderId
    seconds: Seconds


class RegisterScheduler(Secretive, Request, tag="register_scheduler", frozen=True, kw_only=True):
    """An engine's scheduler presents itself, with the leases it holds open and those that it reads under.

    ``complete``: ``leases`` are all that it holds; else a `LeaseOpened` lists more of them after this. ``digest_key``
    is a secret of its own, for the schedulers of peers alone (`EngineCard`). ``home`` as in `RegisterWorker`; it has to
    be the kvd that is asked. ``draining``: it was told to take nothing new in so many seconds (`kvd.wire.drain`).
    Answered by `Registered`.
    """

    engine: EngineFacts
    incarnation: Incarnation
    pid: Whole
    policy: Id = "recompute"
    leases: Annotated[tuple[OpenLease, ...], Meta(max_length=MOST_LEASES_HELD)] = ()
    readers: Annotated[tuple[OpenReader, ...], Meta(max_length=MOST_LEASES_HELD)] = ()
    digest_key: Secret = b""
    complete: bool = True
    home: Endpoint | None = None
    draining: Seconds | None = None


class Registered(Reply, tag="registered", frozen=True, kw_only=True):
    """kvd knows the sender now.

    ``engine_generation`` is empty while workers are missing. ``endpoint`` is where peers reach this kvd (port
    0: no peer socket). ``heartbeat_seconds`` is how often kvd wants to hear from the sender. ``compatibility_class`` is
    its engine's, empty while workers are missing.
    """

    kvd_generation: Id
    engine_generation: Id = ""
    compatibility_class: Id = ""
    host: HostName = ""
    port: Port = 0
    heartbeat_seconds: Seconds = 0.25


class Heartbeat(Request, tag="heartbeat", frozen=True, kw_only=True):
    """A registered client is alive.

    Answered by `Registered`, or by `NotRegistered` when kvd does not know it.
    """

    incarnation: Id


class NotRegistered(Reply, tag="not_registered", frozen=True, kw_only=True):
    """kvd does not know this incarnation: send the card again."""

    kvd_generation: Id


class Unregister(Request, tag="unregister", frozen=True, kw_only=True):
    """An orderly goodbye. Answered by `Ok`."""

    incarnation: Id
