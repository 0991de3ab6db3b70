"""What workers hold of their peers: an operator asks for it through kvd, and may have it given up.

kvd asks each worker of its host (`GetHeld`, `DropPeer`) and adds what it knows of the peers (`AgentList`, `Evicted`).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvd.geometry.rank import Rank
from kvd.wire.limits import MOST_ROWS, Count, Id, Seconds, Text, Whole
from kvd.wire.reply import Reply, Request

MOST_HELD = 4096
"""Peers of one worker that it tells of, once for each generation and use."""
Use: TypeAlias = Literal["reads", "writes", "window"]
"""For what a worker holds it: a lane to read from the peer, one to write to it, or the window that it writes to."""
PeerState: TypeAlias = Literal["live", "away", "gone", "unknown"]
"""Of a peer's generation, as kvd knows it. away: its kvd does not answer; unknown: this kvd was never told of it."""


class HeldPeer(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker holds of one generation of a peer engine, for one use.

    ``lanes`` it has to it, of which ``stuck`` could not be closed. They reach ``bytes`` in ``regions`` of ``workers``
    of the peer. Of these bytes ``mapped_bytes`` are mapped into the worker's process and stay allocated when the peer
    ends; None: the transfer engine does not say. ``loads`` are under way, with ``loading_bytes`` that are posted.
    ``ended``: the worker sees that the peer's process has ended. ``busy`` is the call that its thread is in.
    """

    engine_id: Id
    generation: Id
    use: Use
    lanes: Count = 0
    stuck: Count = 0
    workers: Count = 0
    regions: Count = 0
    bytes: Count = 0
    mapped_bytes: Count | None = 0
    loads: Count = 0
    loading_bytes: Count = 0
    ended: bool = False
    busy: Text = ""


PeersHeld: TypeAlias = Annotated[tuple[HeldPeer, ...], Meta(max_length=MOST_HELD)]


class GetHeld(Request, tag="get_held", frozen=True):
    """kvd to a worker: what it holds of its peers. Answered by `HeldPeers`, at once."""


class DropPeer(Request, tag="drop_peer", frozen=True, kw_only=True):
    """kvd to a worker: close lanes and windows of a peer engine, of one generation where that is named.

    Without ``force`` nothing is closed that a load uses; with it such loads are misses, for the reason ``cause``.
    Answered by `HeldPeers` as it was before. Lanes are closed on threads of their own; `GetHeld` tells what is left.
    """

    engine_id: Id
    generation: Id = ""
    force: bool = False
    cause: Text = ""


class HeldPeers(Reply, tag="held_peers", frozen=True):
    """What a worker holds of its peers."""

    peers: PeersHeld


class ListAgents(Request, tag="list_agents", frozen=True, kw_only=True):
    """An operator: what the workers here hold of their peers. With an ``engine_id`` only of that peer.

    Answered by `AgentList`.
    """

    engine_id: Id = ""


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of this host, with one thing that it holds, or nothing.

    It has registered ``registered_bytes`` in ``regions`` of its own with its backend. ``state`` of the peer's
    generation is since Unix time ``since``, for a ``reason``. ``trouble`` says why the worker did not tell.
    ``hidden``: it is another user's, and the asker may see only its name.
    """

    engine_id: Id
    rank: Rank
    pid: Whole
    backend: Id = ""
    regions: Count = 0
    registered_bytes: Count = 0
    held: HeldPeer | None = None
    state: PeerState = "unknown"
    since: Seconds = 0.0
    reason: Text = ""
    trouble: Text = ""
    hidden: bool = False


Agents: TypeAlias = Annotated[tuple[AgentRow, ...], Meta(max_length=MOST_ROWS)]


class AgentList(Reply, tag="agents", frozen=True):
    """The workers here with what they hold, engine by engine."""

    rows: Agents


class EvictPeer(Request, tag="evict_peer", frozen=True, kw_only=True):
    """An operator: have the workers here give up what they hold of a peer engine, of one generation if that is named.

    Unless it is to ``carry_out``, only say what that would do. Refused where a load uses it, but with ``force``: then
    such loads are misses. The next load from a peer that lives connects anew. Answered by `Evicted`.
    """

    engine_id: Id
    generation: Id = ""
    force: bool = False
    carry_out: bool = False


class Evicted(Reply, tag="evicted", frozen=True, kw_only=True):
    """What was held ``before``, and what is ``left`` of it; before it is carried out ``left`` is the same.

    Workers that do not tell what they hold are in both.
    """

    before: Agents
    left: Agents
    carried_out: bool
