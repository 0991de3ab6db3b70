"""Engines over several hosts: each worker is at the kvd of its own host, and one kvd puts them together.

The kvd where the scheduler registers is the engine's *home*. A kvd whose clients name another home tells that one of
its workers and keeps telling it; both pass on what is for a worker, or from one. All of it goes from kvd to kvd, each
over the link that it has made to the other. Other kvds know the home alone.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.wire.checksum import GetSums
from kvd.wire.handshake import Generations, GetPeer, PeerGone, PeerReady
from kvd.wire.identity import Endpoint, WorkerCard
from kvd.wire.limits import Id, Text
from kvd.wire.push import PushMessage
from kvd.wire.reply import Reply, Request

MOST_OF_PART = 1024
"""Workers of one kvd that a message names: a host of 64 engines has eight of each."""

AskedOfWorker: TypeAlias = PushMessage | GetSums
"""What a worker is asked, and answers itself."""


class PartWorker(msgspec.Struct, frozen=True, array_like=True):
    """A worker and what is to be said of it: why it is silent or gone, nothing while it is well."""

    incarnation: Id
    reason: Text = ""


PartWorkers: TypeAlias = Annotated[tuple[PartWorker, ...], Meta(max_length=MOST_OF_PART)]


class JoinWorker(Request, tag="join_worker", frozen=True, kw_only=True):
    """A worker that is registered with the kvd at ``endpoint``, of an engine whose home you are.

    Sent until it is answered by `PartHeard`.
    """

    endpoint: Endpoint
    card: WorkerCard


class PartAlive(Request, tag="part_alive", frozen=True, kw_only=True):
    """The workers of yours that live at the kvd at ``endpoint``, and those that have gone there since.

    Sent twice a second and at every change: who is not heard of for `AWAY_SECONDS` is gone. Answered by `PartHeard`.
    """

    endpoint: Endpoint
    workers: PartWorkers
    gone: PartWorkers = ()


class PartHeard(Reply, tag="part_heard", frozen=True, kw_only=True):
    """The engines (id, generation) of the workers that were named, as far as they are complete.

    ``unknown`` are the workers that are to be presented again.
    """

    engines: Generations = ()
    unknown: Annotated[tuple[Id, ...], Meta(max_length=MOST_OF_PART)] = ()


class FromWorker(Request, tag="from_worker", frozen=True, kw_only=True):
    """To the home: what a worker at the kvd at ``endpoint`` asks. Answered as the message by itself would be."""

    endpoint: Endpoint
    incarnation: Id
    message: GetPeer | AskedOfWorker


class ForWorker(Request, tag="for_worker", frozen=True, kw_only=True):
    """From the home: what a worker is asked, which it answers itself, or told, which its kvd answers by `Ok`."""

    incarnation: Id
    message: AskedOfWorker | PeerReady | PeerGone
