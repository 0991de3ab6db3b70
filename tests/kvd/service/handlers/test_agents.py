"""What workers hold of their peers, as kvd puts it together, and who may have it given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from kvd.client.session import KvdSession
from kvd.wire.agent import (
    AgentList,
    AgentRow,
    DropPeer,
    Evicted,
    EvictPeer,
    GetHeld,
    HeldPeer,
    HeldPeers,
    ListAgents,
)
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from tests.support.daemons import Daemon, daemons, facts, session, wait_for, worker

HELD = HeldPeer(
    engine_id="p", generation="g-1", use="reads", lanes=1, workers=1, regions=2, bytes=400, mapped_bytes=512
)


class Holder:
    """A worker that holds something, and gives it up when it is told."""

    def __init__(self, *held: HeldPeer) -> None:
        self.held = held
        self.orders: list[DropPeer] = []
        self.stubborn = False

    def on_message(self, message: Message) -> Message | None:
        if not isinstance(message, GetHeld | DropPeer):
            return None
        before = HeldPeers(self.held)
        if isinstance(message, DropPeer):
            self.orders.append(message)
            if not self.stubborn:
                self.held = tuple(
                    one
                    for one in self.held
                    if one.engine_id != message.engine_id or message.generation not in ("", one.generation)
                )
        return before


@contextmanager
def holding(*held: HeldPeer) -> Iterator[tuple[Daemon, Holder]]:
    holder = Holder(*held)
    with daemons(1) as (kvd,), session(kvd, worker(facts("d", role="decode")), holder.on_message):
        yield kvd, holder


def listed(kvd: Daemon, engine_id: str = "") -> tuple[AgentRow, ...]:
    answer = kvd.ask(ListAgents(engine_id=engine_id))
    assert isinstance(answer, AgentList)
    return answer.rows


def evicted(kvd: Daemon, **order: object) -> Evicted:
    answer = kvd.ask(EvictPeer(engine_id="p", **order))  # type: ignore[arg-type]
    assert isinstance(answer, Evicted)
    return answer


def test_a_worker_is_listed_with_what_it_holds_and_with_its_own_memory() -> None:
    other = msgspec.structs.replace(HELD, engine_id="q", ended=True)
    with holding(HELD, other) as (kvd, _):
        rows = listed(kvd)
        assert [(row.engine_id, str(row.rank), row.held) for row in rows] == [
            ("d", "tp0", HELD),
            ("d", "tp0", other),
        ]
        assert [row.state for row in rows] == ["unknown", "gone"]
        assert rows[0].pid
        assert (rows[0].backend, rows[0].registered_bytes > 0) == ("direct", True)
        assert [row.held for row in listed(kvd, "q")] == [other]
        assert listed(kvd, "nobody") == ()


def test_a_worker_that_holds_nothing_has_a_row() -> None:
    with holding() as (kvd, _):
        assert [(row.engine_id, row.held, row.trouble) for row in listed(kvd)] == [("d", None, "")]


def test_a_worker_of_an_earlier_version_has_a_row_that_says_so() -> None:
    with daemons(1) as (kvd,), session(kvd, worker(facts("d", role="decode"))):
        (row,) = listed(kvd)
        assert (row.held, row.trouble) == (None, "its connector is of an earlier version, and does not tell")


def test_the_state_of_a_peer_is_what_kvd_knows_of_that_generation() -> None:
    with ExitStack() as stack:
        there, here = stack.enter_context(daemons(2))
        prefill = ExitStack()
        prefiller: KvdSession = prefill.enter_context(session(there, worker(facts("p", role="prefill"))))
        holder = Holder()
        decoder = stack.enter_context(session(here, worker(facts("d", role="decode")), holder.on_message))
        generation = wait_for(lambda: prefiller.state.engine_generation)
        asked = GetPeer(local_engine="d", engine_id="p", endpoint=there.endpoint)
        assert isinstance(decoder.call(asked, 5.0).result(), PeerReady)
        now, before = (
            msgspec.structs.replace(HELD, generation=which) for which in (generation, "an earlier one")
        )
        holder.held = (now, before)
        states = {row.held.generation: (row.state, row.reason) for row in listed(here) if row.held}
        assert states[generation] == ("live", "")
        assert states["an earlier one"] == ("gone", f"it restarted as generation {generation}")
        prefill.close()
        ended = wait_for(lambda: [row for row in listed(here) if row.state == "gone" and row.held == now])
        assert ended[0].since > 0
        there.stop()


def test_what_is_evicted_is_said_before_and_after() -> None:
    other = msgspec.structs.replace(HELD, generation="g-2")
    with holding(HELD, other) as (kvd, holder):
        plan = evicted(kvd, generation="g-1")
        assert ([row.held for row in plan.before], plan.carried_out) == ([HELD], False)
        assert plan.left == plan.before
        assert not holder.orders
        done = evicted(kvd, generation="g-1", carry_out=True)
        assert ([row.held for row in done.before], done.left, done.carried_out) == ([HELD], (), True)
        (order,) = holder.orders
        assert (order.engine_id, order.generation, order.force) == ("p", "g-1", False)
        assert [row.held for row in listed(kvd)] == [other]


def test_what_still_stands_is_left() -> None:
    with holding(HELD) as (kvd, holder):
        holder.stubborn = True
        assert [row.held for row in evicted(kvd, carry_out=True).left] == [HELD]


def test_while_a_load_is_under_way_only_force_evicts() -> None:
    busy = msgspec.structs.replace(HELD, loads=2)
    with holding(busy) as (kvd, holder):
        refused = kvd.ask_refused(EvictPeer(engine_id="p", carry_out=True))
        assert refused.code == "KVD-EVICT-BUSY"
        assert refused.message == "2 loads of p are under way at d/tp0"
        assert not holder.orders
        assert evicted(kvd, force=True, carry_out=True).left == ()
        assert holder.orders[0].force
        assert holder.orders[0].cause.startswith("an operator had its lane closed (uid ")


@pytest.mark.parametrize("name", [("q", ""), ("p", "g-9")])
def test_what_nobody_holds_cannot_be_evicted(name: tuple[str, str]) -> None:
    with holding(HELD) as (kvd, _):
        refused = kvd.ask_refused(EvictPeer(engine_id=name[0], generation=name[1]))
        assert refused.code == "KVD-EVICT-UNKNOWN"
        assert "; they do of p" in refused.message


def test_where_nobody_holds_anything_no_other_peer_is_named() -> None:
    with holding() as (kvd, _):
        refused = kvd.ask_refused(EvictPeer(engine_id="q"))
        assert refused.message == "no worker here holds anything of q, nor of any other peer"
