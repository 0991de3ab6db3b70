"""The Agents document, what `kvctl agents` prints, and that of an eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvctl.cli.numbers import age, size
from kvctl.cli.units import Bytes, Count, Time
from kvctl.views.folded.rows import listing
from kvctl.views.registry import View, moment
from kvctl.views.screen import Column, ScreenPart, Styled, measure, names, number, state, table
from kvd.geometry.rank import RankName
from kvd.wire.agent import AgentRow, Evicted, HeldPeer

NOTHING = HeldPeer(engine_id="", generation="", use="reads")


class AgentDocument(Struct, frozen=True, kw_only=True):
    """One worker of a host with one thing that it holds of a peer engine, or with nothing."""

    engine_id: str
    rank: RankName
    pid: int
    backend: str
    regions: Annotated[Count, Meta(description="spans of its own memory that it registered with the backend")]
    registered_bytes: Annotated[Bytes, Meta(description="bytes in these spans")]
    peer: Annotated[str | None, Meta(description="the peer engine; null where it holds nothing")]
    generation: Annotated[str, Meta(description="of the peer, as the lane was made for it")]
    use: Annotated[
        str,
        Meta(description="reads or writes: lanes to the peer; window: what the peer writes into; else empty"),
    ]
    state: Annotated[
        str,
        Meta(
            description="of that generation: live, away (its kvd does not answer), gone, unknown; empty without peer"
        ),
    ]
    since: Annotated[Time | None, Meta(description="when it came into that state, where that is known")]
    reason: str
    lanes: Count
    stuck: Annotated[Count, Meta(description="lanes that could not be closed yet; that is tried each second")]
    peer_workers: Annotated[Count, Meta(description="workers of the peer that the lanes reach")]
    peer_regions: Annotated[Count, Meta(description="spans of their memory that the lanes reach")]
    peer_bytes: Annotated[Bytes, Meta(description="bytes in these spans")]
    mapped_bytes: Annotated[
        Bytes | None,
        Meta(
            description="of the peer's memory, mapped into this process; null: the transfer engine does not say"
        ),
    ]
    pinned_bytes: Annotated[
        Bytes,
        Meta(
            description="mapped of a peer that is not live, so it cannot be freed; of an engine that does not say"
            " what it maps, all that the lanes reach, which is the most"
        ),
    ]
    loads: Annotated[Count, Meta(description="loads that use it, or wait for it")]
    loading_bytes: Annotated[Bytes, Meta(description="bytes that are posted for them")]
    busy: Annotated[str, Meta(description="the call into the backend that its thread is in")]
    trouble: Annotated[str, Meta(description="why the worker did not tell what it holds")]


class AgentsDocument(Struct, frozen=True, kw_only=True):
    """What the workers of a host hold of their peers, engine by engine."""

    agents: tuple[AgentDocument, ...]


class EvictedLanes(Struct, frozen=True, kw_only=True):
    """What one worker gave up of a peer, or would."""

    engine_id: str
    rank: RankName
    peer: str
    generation: str
    use: str
    lanes: Annotated[Count, Meta(description="lanes that it had before")]
    left: Annotated[Count, Meta(description="lanes that still stand")]
    loads: Annotated[Count, Meta(description="loads that are misses, which only --force allows")]
    freed_bytes: Annotated[
        Bytes,
        Meta(
            description="of the peer's memory, mapped here before and no longer; or that would be, without --yes"
        ),
    ]
    at_most: Annotated[
        bool, Meta(description="the transfer engine does not say what it maps: it was at most so much")
    ]
    trouble: Annotated[str, Meta(description="why the worker did not tell what it holds, or why lanes stand")]
    carried_out: bool


class Eviction(Struct, frozen=True, kw_only=True):
    """What the workers of a host gave up of a peer, or would."""

    evicted: tuple[EvictedLanes, ...]


def agent_document(row: AgentRow) -> AgentDocument:
    """The document of one row of kvd's answer."""
    held = row.held or NOTHING
    return AgentDocument(
        engine_id=row.engine_id,
        rank=str(row.rank),
        pid=row.pid,
        backend=row.backend,
        regions=row.regions,
        registered_bytes=row.registered_bytes,
        peer=row.held.engine_id if row.held else None,
        generation=held.generation,
        use=held.use if row.held else "",
        state=row.state if row.held else "",
        since=moment(row.since) if row.held and row.since else None,
        reason=row.reason,
        lanes=held.lanes,
        stuck=held.stuck,
        peer_workers=held.workers,
        peer_regions=held.regions,
        peer_bytes=held.bytes,
        mapped_bytes=held.mapped_bytes,
        pinned_bytes=_mapped_at_most(held) if row.state != "live" else 0,
        loads=held.loads,
        loading_bytes=held.loading_bytes,
        busy=held.busy,
        trouble=row.trouble,
    )


def _mapped_at_most(held: HeldPeer) -> int:
    return held.bytes if held.mapped_bytes is None else held.mapped_bytes


def eviction_document(answer: Evicted) -> Eviction:
    """The document of kvd's answer."""
    left = {_key(row): row.held for row in answer.left if row.held}
    return Eviction(evicted=tuple(_evicted(row, left.get(_key(row)), answer) for row in answer.before))


def _key(row: AgentRow) -> tuple[str, str, str, str]:
    held = row.held or NOTHING
    return row.engine_id, str(row.rank), held.generation, held.use


def _evicted(row: AgentRow, left: HeldPeer | None, answer: Evicted) -> EvictedLanes:
    held, still = row.held or NOTHING, left or NOTHING
    freed = _mapped_at_most(held) - (_mapped_at_most(still) if answer.carried_out else 0)
    busy = f"its thread is busy {still.busy}" if answer.carried_out and still.busy else ""
    return EvictedLanes(
        engine_id=row.engine_id,
        rank=str(row.rank),
        peer=held.engine_id,
        generation=held.generation,
        use=held.use,
        lanes=held.lanes,
        left=still.lanes,
        loads=held.loads,
        freed_bytes=max(0, freed),
        at_most=held.mapped_bytes is None,
        trouble=row.trouble or busy,
        carried_out=answer.carried_out,
    )


def agents_screen(body: AgentsDocument, wide: bool) -> ScreenPart:
    """One holding of a worker a line, and what is pinned of peers that do not live."""
    return [listing(body.agents, *agent_columns(body.agents, wide)), *pinned_lines(body.agents)]


def agent_columns(agents: Sequence[AgentDocument] = (), wide: bool = False) -> list[Column[Any]]:
    """The columns of what workers hold, their engine first."""
    troubled = wide or any(agent.trouble for agent in agents)
    uses = wide or any(agent.use not in ("", "reads") for agent in agents)
    return [
        names("ENGINE", lambda a: a.engine_id),
        names("RANK", lambda a: a.rank),
        names("PID", lambda a: a.pid or "-", wide),
        Column("BACKEND", lambda a: a.backend or "-", wide),
        measure("OWN", lambda a: size(a.registered_bytes), lambda a: a.registered_bytes, wide),
        number("OWN REGIONS", lambda a: a.regions, wide),
        names("PEER", lambda a: a.peer),
        names("GENERATION", lambda a: a.generation or "-"),
        Column("STATE", lambda a: state(a.state or "-")),
        measure("SINCE", lambda a: age(a.since) if a.since else "-", _ago),
        Column("USE", lambda a: a.use or "-", uses),
        measure("LANES", lambda a: a.lanes, lambda a: a.lanes),
        measure("STUCK", lambda a: a.stuck, lambda a: a.stuck, wide),
        measure("REACHES", lambda a: size(a.peer_bytes), lambda a: a.peer_bytes, wide),
        number("REGIONS", lambda a: a.peer_regions, wide),
        measure("MAPPED", _mapped, lambda a: a.mapped_bytes),
        measure("PINNED", _pinned, lambda a: a.pinned_bytes),
        measure("LOADS", lambda a: a.loads, lambda a: a.loads, wide),
        measure("IN FLIGHT", lambda a: size(a.loading_bytes), lambda a: a.loading_bytes),
        names("BUSY", lambda a: a.busy or "-", wide),
        names("REASON", lambda a: a.trouble or a.reason or "-", troubled),
    ]


def _ago(agent: AgentDocument) -> float | None:
    return -agent.since.timestamp() if agent.since else None


def _mapped(agent: AgentDocument) -> str:
    return "unknown" if agent.mapped_bytes is None else size(agent.mapped_bytes)


def _pinned(agent: AgentDocument) -> str:
    most = "<=" if agent.mapped_bytes is None and agent.pinned_bytes else ""
    return f"{most}{size(agent.pinned_bytes)}"


def pinned_lines(agents: Iterable[AgentDocument]) -> list[ScreenPart]:
    """How much stays mapped of peers that are gone, and of those that may be; nothing where nothing does."""
    rows = [agent for agent in agents if agent.peer and agent.state != "live" and agent.lanes]
    if not rows:
        return []
    lines: list[ScreenPart] = [""]
    for states, what in ((("gone",), "gone"), (("away", "unknown"), "may be gone")):
        found = [row for row in rows if row.state in states]
        if not found:
            continue
        total = sum(row.pinned_bytes for row in found)
        sure = sum(row.pinned_bytes for row in found if row.mapped_bytes is not None)
        pinned = f"{size(sure)} pinned" + (f", at most {size(total)}" if total > sure else "")
        lanes, peers = sum(row.lanes for row in found), len({(row.peer, row.generation) for row in found})
        counted = f"{peers} {'peer' if peers == 1 else 'peers'}, {lanes} {'lane' if lanes == 1 else 'lanes'}"
        lines.append(Styled(f"{what}: {counted}, {pinned}", "yellow"))
    return lines


def agent_names(agents: Iterable[AgentDocument]) -> str:
    """PEER@GENERATION of all that is held, each once, as `kvctl agents evict` takes it."""
    held = (f"{a.peer}@{a.generation}" for a in agents if a.peer)
    return "".join(f"{name}\n" for name in dict.fromkeys(held))


def eviction_screen(body: Eviction, wide: bool) -> ScreenPart:
    """One worker's lanes a line, and how much was freed."""
    freed = sum(one.freed_bytes for one in body.evicted)
    most = "at most " if any(one.at_most for one in body.evicted) else ""
    done = "freed" if any(one.carried_out for one in body.evicted) else "would be freed"
    troubled = wide or any(one.trouble for one in body.evicted)
    return [
        table(
            body.evicted,
            names("ENGINE", lambda x: x.engine_id),
            names("RANK", lambda x: x.rank),
            names("PEER", lambda x: x.peer or "-"),
            names("GENERATION", lambda x: x.generation or "-"),
            Column("USE", lambda x: x.use),
            measure("LANES", lambda x: x.lanes, lambda x: x.lanes),
            measure("LEFT", lambda x: x.left, lambda x: x.left),
            measure("MISSES", lambda x: x.loads, lambda x: x.loads),
            measure(
                "FREED", lambda x: ("<=" if x.at_most else "") + size(x.freed_bytes), lambda x: x.freed_bytes
            ),
            names("TROUBLE", lambda x: x.trouble or "-", troubled),
        ),
        "",
        f"{most}{size(freed)} of its memory {done}",
    ]


VIEWS = (
    View(
        AgentsDocument,
        agents_screen,
        "agents",
        AgentDocument,
        {"name": lambda body: agent_names(body.agents)},
    ),
    View(Eviction, eviction_screen, "evicted", EvictedLanes),
)
