"""What an operator asks of a kvd: engines, workers, status."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint, EngineCard, EngineFacts
from kvd.wire.limits import (
    MOST_COUNTERS,
    MOST_LEASE_READERS,
    MOST_RANKS,
    MOST_ROWS,
    Count,
    Id,
    Number,
    Seconds,
    Text,
    Whole,
)
from kvd.wire.locality import Locality
from kvd.wire.reply import Reply, Request


class ListEngines(Request, tag="list_engines", frozen=True, kw_only=True):
    """All engines that this kvd knows, local ones and peers. Answered by `EngineList`.

    ``after`` is the ``more`` of the answer before.
    """

    cards: bool = False
    after: Text = ""


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    ``state``: ready, partial (ranks missing), gone (seen before, dead), unreachable (a peer's kvd is away).

    ``since`` is Unix time of the last change of state. ``card`` comes only when asked for. ``hidden``: it is another
    user's, and the asker may see only its name and state. ``draining``: it is to be given nothing new
    (`kvd.wire.drain`). ``compatibility_class`` as on its card, empty while it is not complete.
    """

    engine: EngineFacts
    generation: Id
    local: bool
    state: Id
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)]
    since: Seconds
    endpoint: Endpoint = Endpoint()
    scheduler: bool = False
    policy: Id = ""
    leases: Count = 0
    reason: Text = ""
    peers: Annotated[tuple[Id, ...], Meta(max_length=MOST_ROWS)] = ()
    card: EngineCard | None = None
    hidden: bool = False
    draining: bool = False
    compatibility_class: Id = ""


class EngineList(Reply, tag="engines", frozen=True, kw_only=True):
    """The engines, local ones first. ``more``: there are further ones; ask again after it."""

    rows: Annotated[tuple[EngineRow, ...], Meta(max_length=MOST_ROWS)]
    more: Text = ""


class ListWorkers(Request, tag="list_workers", frozen=True, kw_only=True):
    """The local workers and schedulers. Answered by `WorkerList`. ``after`` is the ``more`` of the answer before."""

    after: Text = ""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One local client.

    ``kind``: worker or scheduler; ``state``: alive, silent (heartbeats missing), gone. ``hidden``: it is another
    user's, and the asker may see only its name and state. ``at`` is the kvd that it is registered with, if that is
    another one (`kvd.wire.part`). ``locality`` as the worker told it; None of those that did not, and of others' hosts.
    """

    kind: Id
    engine_id: Id
    rank: Rank | None
    pid: Whole
    incarnation: Id
    state: Id
    registered: Seconds
    heartbeat_age: Seconds
    backend: Id = ""
    regions: Count = 0
    registered_bytes: Count = 0
    reason: Text = ""
    hidden: bool = False
    at: Endpoint | None = None
    locality: Locality | None = None


class WorkerList(Reply, tag="workers", frozen=True, kw_only=True):
    """The local clients, engine by engine. ``more``: there are further ones; ask again after it."""

    rows: Annotated[tuple[WorkerRow, ...], Meta(max_length=MOST_ROWS)]
    more: Text = ""


class ListLeases(Request, tag="list_leases", frozen=True, kw_only=True):
    """Leases of the engines here that have readers, and leases of other engines that those here read under.

    Each is a transfer on its way. The ``limit`` oldest of both are shown. Answered by `LeaseList`.

    ``every``: also those that nobody has claimed, in pages; ``after`` is the ``more`` of the answer before. With an
    ``engine_id`` only those that this engine gave or claimed.
    """

    limit: Count = 256
    every: bool = False
    engine_id: Id = ""
    after: Text = ""


class LeaseReader(msgspec.Struct, frozen=True, kw_only=True):
    """Who claimed a lease: an engine here, or another host by its place or its key.

    ``left``: seconds for which it was promised that the blocks are kept.
    """

    who: Text
    left: Seconds


class LeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lease of ``engine_id``, a prefiller, on the blocks of ``request_id``.

    ``reader`` is the engine here that claimed it; empty of a lease of an engine here, which has ``readers`` and
    ``blocks``. ``age``: seconds since it was opened, or claimed. ``left``: seconds for which it is kept.
    Where ``every`` lease was asked for, ``claims`` are some of its readers, those promised most. ``ending``: nobody
    else is let in, and it ends when its readers have gone (`kvd.wire.order.EndLease`). ``claim_id`` tells apart what
    one engine claimed.
    """

    engine_id: Id
    request_id: Id
    reader: Id = ""
    age: Seconds = 0.0
    left: Seconds = 0.0
    readers: Count = 0
    blocks: Count = 0
    endpoint: Endpoint = Endpoint()
    claims: Annotated[tuple[LeaseReader, ...], Meta(max_length=MOST_LEASE_READERS)] = ()
    ending: bool = False
    claim_id: Id = ""


class LeaseList(Reply, tag="leases", frozen=True, kw_only=True):
    """Leases that somebody reads under, the oldest first, and how many there are of each kind.

    ``given`` are those of engines here that have readers, ``open`` also those that nobody has claimed, ``taken`` those
    that engines here read under. Of ``hidden`` others the asker may see nothing: they are of other users' engines.
    Where ``every`` lease was asked for nothing is counted but those; ``more``: there are further ones, ask after it.
    """

    rows: Annotated[tuple[LeaseRow, ...], Meta(max_length=MOST_ROWS)]
    open: Count = 0
    given: Count = 0
    taken: Count = 0
    hidden: Count = 0
    more: Text = ""


class GetStatus(Request, tag="get_status", frozen=True, kw_only=True):
    """How this kvd is. Answered by `KvdStatus`."""


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Another kvd. ``state``: connecting, up, down, untrusted (it is to be linked, without a trusted key).

    ``rtt`` in seconds of the last ping. ``reason`` says why it is not up, ``hint`` what to do; both may be empty.
    """

    endpoint: Endpoint
    kvd_id: Id
    state: Id
    rtt: Seconds
    since: Seconds
    reason: Text = ""
    hint: Text = ""


class RefusedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was not let in on the peer socket, and from where it came; ``age`` in seconds of the last attempt.

    ``key`` empty: somebody expects another key of this kvd than it has. ``was`` is the place that the key was trusted
    for until it was revoked, while this kvd ran.
    """

    key: Id
    address: Text
    times: Count
    age: Seconds
    was: Text = ""


class PeerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """How a kvd tells other hosts apart: not at all, all but those that share its pair, or by a key for each.

    ``public`` is its own key. ``trusted`` keys are let in; those in ``list_file`` where there is one, and ``error``
    says why that cannot be read now. ``twice`` names places that have two keys in it, of which the last counts.
    ``pair`` says why kvd would not be who it is after its next start: another pair stands in ``key_file``, or none.
    """

    identity: Literal["none", "shared", "per host"] = "none"
    public: Id = ""
    trusted: Count = 0
    key_file: Text = ""
    list_file: Text = ""
    error: Text = ""
    twice: Text = ""
    pair: Text = ""


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """From where a kvd learns which others there are: ``source`` is static (``peer.connect`` alone), dns or etcd.

    ``state``: waiting (for the first answer), known, or away for ``age`` seconds, with the ``reason``. ``members`` are
    the others that it links to. ``vanished`` of them the source does not name any more; their links still work.
    ``other_key``: so many are not linked, since the source tells another key than is expected.
    """

    source: Id
    state: Id
    age: Seconds = 0.0
    reason: Text = ""
    members: Count = 0
    vanished: Count = 0
    other_key: Count = 0


class KvdStatus(Reply, tag="status", frozen=True, kw_only=True):
    """One kvd at one moment. ``counters`` only ever grow; ``gauges`` are values of now.

    ``ledger_away`` says why its ledger cannot be written now, and is empty while it can. ``keys`` None: it has no peer
    socket, or is of an earlier version. ``refused`` are the keys that were not let in of late, as far as remembered.
    ``ledger_aside`` are files of damaged ledgers that lie beside it. ``comparing`` says why no engines can be compared,
    and so none of other hosts introduced; empty while they can. ``version`` is what it was started with, ``installed``
    what its host has now, empty of an earlier version. ``clock`` is its time of day as it answers, None of an earlier
    version: for people who compare two hosts, nothing else goes by it. ``membership`` is None of an earlier version.
    """

    kvd_id: Id
    generation: Id
    version: Id
    pid: Whole
    host: Id
    started: Seconds
    runtime_dir: Text
    endpoint: Endpoint
    counters: Annotated[dict[Id, Whole], Meta(max_length=MOST_COUNTERS)]
    gauges: Annotated[dict[Id, Number], Meta(max_length=MOST_COUNTERS)]
    peers: Annotated[tuple[PeerRow, ...], Meta(max_length=MOST_ROWS)] = ()
    draining: bool = False
    ledger_away: Text = ""
    keys: PeerKeys | None = None
    ledger_aside: Annotated[tuple[Text, ...], Meta(max_length=MOST_ROWS)] = ()
    comparing: Text = ""
    refused: Annotated[tuple[RefusedKey, ...], Meta(max_length=MOST_ROWS)] = ()
    installed: Id = ""
    clock: Seconds | None = None
    membership: Membership | None = None
