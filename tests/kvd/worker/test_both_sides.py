"""Prefilling workers push to a decoding one: both real, the memory backend between, a kvd that only passes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.backends import memory
from kvd.backends.memory import Faults, open_backend
from kvd.client.records import block_runs
from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList
from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady
from kvd.wire.identity import Endpoint, EngineCard
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.reply import Ok
from kvd.wire.transfer import ReportTransfers
from kvd.worker.orders import LoadOrder, StepOrders
from kvd.worker.push import receiver as arriving
from kvd.worker.push.target import Post
from kvd.worker.remote import RemotePrefill
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.kvd.topology.test_oracle import cases
from tests.support import oracle
from tests.support.rigs.bench import GENERATION, Script, eventually
from tests.support.rigs.dense import REQUEST, dense, shrunk
from tests.support.rigs.pull import Gates, SlowBackend, gather
from tests.support.rigs.send import DECODER_GENERATION, SendRig, sending, step


class Passing(Script):
    """A session of the decoder's whose kvd passes words to all prefilling workers, while the line is not cut."""

    send: Callable[[Message], list[Any]]
    cut = False

    def deliver(
        self, key: str, message: Any, keep_seconds: float = 600.0, *, after: float = 0.0
    ) -> Future[Message]:
        future = super().deliver(key, message, keep_seconds, after=after)
        word = self.delivered[-1].message
        if isinstance(word, (PushAnnounce, PushWithdraw, PushDone)) and not self.cut:
            way_back = msgspec.structs.replace(word.key, decoder_endpoint=Endpoint("d", 2))
            answers = self.send(msgspec.structs.replace(word, key=way_back))
            if all(isinstance(answer, Ok) for answer in answers):
                future.set_result(Ok())
        return future


class Both:
    """A `SendRig` whose decoder is real: worker ``rank`` of it."""

    def __init__(self, rig: SendRig, rank: int, *, lands: bool) -> None:
        self.rig, self.rank, self.faults = rig, rank, Faults()
        self.wire = Passing()
        self.wire.send = rig.send
        self.wire.state = replace(self.wire.state, engine_generation=DECODER_GENERATION)
        backend: Any = open_backend("d", options={"faults": self.faults})
        if not lands:
            backend = SlowBackend(backend, Gates())
            backend.traits = replace(backend.traits, lands=False)
        self.half = WorkerHalf(
            ConnectorSettings(backend="memory", mode="push", probe=False),
            rig._facts("d", rig.d),
            rig.d.workers[rank],
            rig.d.workers,
            backend,
            self.wire.open,
            memory=rig.targets[rank],
        )
        rig.decoder_exports(rank, self.wire.card().card.metadata)
        for worker in rig.workers:
            self._listen(worker.wire)
        cards = tuple(worker.wire.card().card for worker in rig.workers)
        card = EngineCard(engine=cards[0].engine, generation=GENERATION, workers=cards)
        self.wire.push(PeerReady(local_engine="d", peer=card))

    def _listen(self, wire: Any) -> None:
        deliver = wire.deliver

        def heard(key: str, message: Any, keep_seconds: float = 600.0) -> Future[Message]:
            future: Future[Message] = deliver(key, message, keep_seconds)
            word = wire.delivered[-1].message
            if isinstance(word, PushProgress) and not self.wire.cut:
                assert isinstance(self.wire.push(word), Ok)
            return future

        wire.deliver = heard

    def order(
        self,
        blocks: Mapping[int, BlockList],
        tokens: int,
        *,
        computed: int = 0,
        name: str = "x",
        pulled: Mapping[int, BlockList] | None = None,
    ) -> None:
        """Load a request that is pushed; or, of ``pulled`` blocks of the prefiller, one that is read."""
        theirs = [] if pulled is None else [pulled[group] for group in sorted(pulled)]
        prefill = RemotePrefill(
            engine_id="p", request_id="", generation=GENERATION, host="p", port=1, tokens=tokens,
            blocks=tuple(tuple(b.ids.tolist()) for b in theirs), first_blocks=tuple(b.first for b in theirs),
            lease_seconds=0.0, lease_opened=0.0,
        )  # fmt: skip
        groups = {g: (b.first, tuple(b.ids.tolist())) for g, b in blocks.items()}
        now = time.monotonic()
        transfer = name if pulled is None else ""
        order = LoadOrder(name, prefill, groups, tokens, 60.0, now, transfer_id=transfer, computed=computed)
        self.half.start(StepOrders(loads=[order]))

    def expire(self, name: str = "x") -> None:
        eventually(lambda: self.half._peers.receive_threads["p"]._arrivals._active[name].exposed)
        self.half.loads.begun[name].deadline = 0.0
        self.half._peers.receive_threads["p"].on_peer_changed()  # have the thread look

    def untouched(self) -> bool:
        return all(bool((region == oracle.UNTOUCHED).all()) for region in self.rig.targets[self.rank].regions)


@contextmanager
def both(p: EngineGeometry, d: EngineGeometry, rank: int = 0, *, lands: bool = True) -> Iterator[Both]:
    with sending(p, d) as rig:
        made = Both(rig, rank, lands=lands)
        try:
            yield made
        finally:
            made.half.close()


@pytest.mark.parametrize("lands", [True, False], ids=["written", "read"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_is_pushed_is_what_pull_would_leave(lands: bool, data: st.DataObject) -> None:
    local, remote, rank, request = data.draw(cases())
    chunks = [*sorted(data.draw(st.lists(st.integers(1, request.tokens), max_size=3))), request.tokens]
    decoder_first = data.draw(st.booleans())
    with both(shrunk(remote), shrunk(local), rank, lands=lands) as sides:
        sides.rig.fill(request.remote)
        if decoder_first:
            sides.order(request.local, request.tokens, computed=request.computed)
        for reached in chunks:
            sides.rig.run(step(request.remote, reached, request.tokens))
        sides.rig.end()
        if not decoder_first:
            sides.order(request.local, request.tokens, computed=request.computed)
        results = gather(sides.half, 1)
        assert not results.failed, sides.half.outcomes()
        assert sides.rig.as_pulled(request, rank, decoder=True)
        reports = eventually(lambda: sides.wire.told(ReportTransfers))
        (record,) = (record for report in reports for record in report.records)
        assert record.local_blocks == block_runs(request.local)
        if record.bytes:  # whoever supplied any of it says where it stood
            assert record.remote_blocks == block_runs(request.remote)


@pytest.mark.parametrize("lands", [True, False], ids=["written", "read"])
@pytest.mark.parametrize(("prefillers", "decoders"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_prefiller_may_free_its_blocks_when_all_decoding_workers_have_theirs(
    prefillers: int,
    decoders: int,
    lands: bool,
) -> None:
    with sending(dense("p", tp=prefillers), dense("d", tp=decoders)) as rig:
        rig.fill(REQUEST.remote)
        sides = [Both(rig, rank, lands=lands) for rank in range(decoders)]
        for side in sides:
            side.order(REQUEST.local, REQUEST.tokens)
        rig.run(step(REQUEST.remote, REQUEST.tokens, REQUEST.tokens), layers=("a", "b"))
        rig.end()
        for rank, side in enumerate(sides):
            assert gather(side.half, 1).failed == set()
            assert rig.as_pulled(REQUEST, rank, decoder=True)
        eventually(lambda: rig.all_sent("r"))
        for side in sides:
            side.half.close()


# --- late writes ---


def flying(sides: Both) -> list[Post]:
    """What the prefilling worker has posted and not seen the end of."""
    senders = list(sides.rig.workers[0].half.pushing._senders.values())
    return [
        piece for sender in senders for target in list(sender._targets.values()) for piece in target.flying
    ]


def test_a_write_that_is_held_ends_at_the_prefiller_before_the_miss_is_reported() -> None:
    with both(dense("p"), dense("d")) as sides:
        sides.rig.fill(REQUEST.remote)
        faults = sides.rig.workers[0].faults
        faults.hold = {0, 1}
        sides.order(REQUEST.local, REQUEST.tokens)
        sides.rig.run(step(REQUEST.remote, REQUEST.tokens, REQUEST.tokens))
        eventually(lambda: flying(sides))
        sides.expire()
        assert gather(sides.half, 1).failed == {"x"}
        assert sides.wire.told(PushWithdraw)
        faults.release(0)
        faults.release(1)
        assert sides.untouched()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """A prefiller that hears nothing any more, with a write under way."""
    monkeypatch.setattr(arriving, "QUIESCE_SECONDS", 0.05)
    with both(dense("p"), dense("d")) as sides:
        sides.rig.fill(REQUEST.remote)
        sides.rig.workers[0].faults.hold = set(range(10))
        sides.order(REQUEST.local, REQUEST.tokens)
        sides.rig.run(step(REQUEST.remote, REQUEST.tokens, REQUEST.tokens))
        eventually(lambda: flying(sides))
        sides.wire.cut = True
        yield sides


def go_on(sides: Both) -> None:
    """The write that was held runs at the prefiller's next poll; wait until it has."""
    (piece, *_) = flying(sides)
    sides.rig.workers[0].faults.hold.clear()
    eventually(lambda: piece.transfer.ended)


def test_nothing_lands_after_the_miss_of_a_prefiller_that_goes_on_later(stopped: Both) -> None:
    stopped.expire()
    assert gather(stopped.half, 1).failed == {"x"}
    go_on(stopped)
    assert stopped.untouched()


def test_it_would_land_if_the_window_were_not_taken_away(
    stopped: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.MemoryWindow, "close", lambda _self: None)
    stopped.expire()
    assert gather(stopped.half, 1).failed == {"x"}
    go_on(stopped)
    assert not stopped.untouched()
    monkeypatch.undo()


def test_a_prefiller_that_dies_is_no_reason_to_wait(stopped: Both) -> None:
    stopped.wire.push(PeerGone(engine_id="p", generation=GENERATION, reason="killed"))
    assert gather(stopped.half, 1).failed == {"x"}
    go_on(stopped)
    assert stopped.untouched()
