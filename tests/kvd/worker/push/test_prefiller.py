"""The prefilling worker: what it writes and when, what it tells the decoder, and when blocks may go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.geometry.model import EngineGeometry
from kvd.topology.blocks import BlockList
from kvd.wire.push import PushWithdraw
from kvd.wire.reply import Ok, Refused
from kvd.worker.push import prefiller
from kvd.worker.push.target import Post
from kvd.worker.push.write_lanes import WriteLanes
from tests.kvd.topology.test_oracle import cases
from tests.support import oracle
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense, ids
from tests.support.rigs.send import SendRig, sending, step


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


# --- what is written, and when ---


def test_a_layer_is_sent_while_the_next_one_is_computed(rig: SendRig) -> None:
    assert announce(rig) == [Ok()]
    rig.begin(step(REQUEST.remote, 40, 40))
    rig.hook("a")
    eventually(lambda: rig.there() == {("a", 40)})
    rig.hook("b")
    eventually(lambda: rig.there() == {("a", 40), ("b", 40)})
    rig.stepped()
    assert rig.as_pulled(REQUEST)
    assert not any(p.quiesced or p.failed for p in rig.progress())


def test_a_layer_without_a_hook_is_sent_when_the_step_is_over(rig: SendRig) -> None:
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40), ["b"])
    eventually(lambda: rig.there() == {("a", 40), ("b", 40)})
    assert rig.as_pulled(REQUEST)


def test_chunks_are_sent_as_far_as_blocks_are_full(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.hold |= {1}
    rig.run(step({0: ids(1, 2)}, 31, 40), ["a", "b"])
    eventually(lambda: worker.half._backend._inner.submits.__reduce__()[1][0] >= 1)  # type: ignore[attr-defined]
    rig.run(step(REQUEST.remote, 40, 40, held=31), ["a", "b"])
    assert not any(tokens < 40 for _, tokens in rig.there())
    worker.faults.release(1)
    eventually(lambda: len(rig.there()) == 2)
    assert rig.as_pulled(REQUEST)


def test_a_cached_prefix_is_sent_before_anything_is_computed(rig: SendRig) -> None:
    announce(rig)
    rig.begin(step(REQUEST.remote, 40, 40, held=32))
    first = rig.targets[0].regions[0]
    eventually(lambda: bool((first != oracle.UNTOUCHED).any()))
    rig.hook("a")
    rig.stepped()
    eventually(lambda: len(rig.there()) == 2)
    assert rig.as_pulled(REQUEST)


def test_the_announcement_may_come_when_all_is_computed(rig: SendRig) -> None:
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    announce(rig)
    eventually(lambda: rig.all_sent("r"))
    assert rig.as_pulled(REQUEST)


def test_a_decoder_that_has_a_prefix_gets_the_rest_only(rig: SendRig) -> None:
    rest = oracle.Request({0: BlockList(2, np.array([5], np.int64))}, REQUEST.remote, 40)
    rig.announce(rest.local, 40)
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: len(rig.there()) == 2)
    assert rig.as_pulled(rest)


def test_a_decoder_that_needs_nothing_is_told_that_all_is_there(rig: SendRig) -> None:
    rig.announce({0: BlockList(3, np.zeros(0, np.int64))}, 40)
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert rig.as_pulled(oracle.Request({}, REQUEST.remote, 40))


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
@given(cases(), st.data())
def test_any_pair_of_engines_ends_up_as_pull_would_leave_it(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request], data: st.DataObject
) -> None:
    """Random geometries, chunks, orders of hooks, prefixes and times of announcement; with posts that fail."""
    d, p, _, request = case
    total = request.tokens
    sizes = {g.index: 0 if g.kind == "mamba" else g.block_size for g in p.workers[0].groups}
    reached = sorted(data.draw(st.sets(st.integers(1, total), max_size=3)) | {total})
    early = data.draw(st.integers(0, len(reached)))
    with sending(p, d) as rig:
        rig.fill(request.remote)
        for worker in rig.workers:
            worker.faults.refuse |= data.draw(st.sets(st.integers(0, 3), max_size=2))
        held = data.draw(st.integers(0, reached[0]))
        for number, end in enumerate([*reached, None]):
            if number == early:
                for n in range(len(d.workers)):
                    rig.announce(request.local, total, worker=n)
            if end is None:
                continue
            blocks = {
                g: BlockList(b.first, b.ids[: max(0, -(-end // sizes[g]) - b.first)])
                for g, b in request.remote.items()
                if sizes[g]
            }
            names = data.draw(st.permutations([n for w in rig.workers for n in w.half.geometry.layers]))
            rig.run(step(blocks, end, total, held=held), names[: data.draw(st.integers(0, len(names)))])
            held = end
        rig.run(step(request.remote, total, total, held=total))
        rig.end()
        eventually(lambda: rig.all_sent("r"), 30)
        for n in range(len(d.workers)):
            assert not any(rig.failures(prefiller=i, worker=n) for i in range(len(rig.workers)))
            assert rig.as_pulled(request, n)


# --- more than one on either side ---


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2), (2, 2)])
def test_every_worker_writes_its_part(p_tp: int, d_tp: int) -> None:
    with sending(dense("p", tp=p_tp), dense("d", tp=d_tp)) as rig:
        rig.fill(REQUEST.remote)
        for n in range(d_tp):
            announce(rig, worker=n)
        rig.run(step(REQUEST.remote, 40, 40))
        rig.end()
        eventually(lambda: rig.all_sent("r"))
        assert all(rig.as_pulled(REQUEST, n) for n in range(d_tp))


def test_blocks_stay_until_every_decoding_worker_has_its_part() -> None:
    with sending(dense("p"), dense("d", tp=2)) as rig:
        rig.fill(REQUEST.remote)
        announce(rig, worker=0)
        rig.run(step(REQUEST.remote, 40, 40))
        rig.end()
        eventually(lambda: len(rig.there(worker=0)) == 2)
        assert rig.sent() == [set()]
        announce(rig, worker=1)
        eventually(lambda: rig.all_sent("r"))


def test_layers_that_share_a_cache_are_sent_once() -> None:
    from dataclasses import replace

    def shared(engine: EngineGeometry) -> EngineGeometry:
        (worker,) = engine.workers
        (group,) = worker.groups
        also = replace(group.layers[0], name="c")
        group = replace(group, layers=(*group.layers, also))
        return replace(engine, workers=(replace(worker, groups=(group,)),))

    with sending(shared(dense("p")), shared(dense("d"))) as rig:
        rig.fill(REQUEST.remote)
        announce(rig)
        rig.run(step(REQUEST.remote, 40, 40), ["a", "c", "b"])
        rig.end()
        eventually(lambda: rig.all_sent("r"))
        assert rig.there() == {("a", 40), ("b", 40)}
        assert rig.as_pulled(REQUEST)


# --- preemption and the end of requests ---


def test_what_was_under_way_when_its_request_was_preempted_is_sent_again(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 32, 40))
    eventually(lambda: worker.gates.opened)
    rig.begin(step({}, 0, 40, again=True))
    other = {0: ids(20, 21, 22)}
    for memory in (worker.memory,):  # its blocks are another request's now
        for region in memory.regions:
            region[:] = 7
    worker.faults.release(0)
    rig.fill(other)
    rig.run(step(other, 40, 40))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert rig.as_pulled(oracle.Request(REQUEST.local, other, 40))


def test_blocks_that_the_request_loses_while_they_are_posted_are_posted_once(
    rig: SendRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(rig)
    post, posts = WriteLanes.post, []

    def preempted(lanes: WriteLanes, *what: Any) -> Post:
        posts.append(post(lanes, *what))
        if len(posts) == 1:
            rig.begin(step({}, 0, 40, again=True))
        return posts[-1]

    monkeypatch.setattr(WriteLanes, "post", preempted)
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: posts)
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert len(posts) <= 3
    assert rig.as_pulled(REQUEST)


def test_what_was_written_before_a_preemption_stays(rig: SendRig) -> None:
    announce(rig)
    rig.run(step({0: ids(1, 2)}, 32, 40))
    region = rig.targets[0].regions[1]
    right = rig.expected(REQUEST)
    eventually(lambda: bool((region != oracle.UNTOUCHED).any()))
    eventually(lambda: not rig.workers[0].half.pushing._senders["d"]._targets[("x", rig.key().rank)].flying)
    count = next(rig.workers[0].half._backend._inner.submits)  # type: ignore[attr-defined]
    rig.begin(step({}, 0, 40, again=True))
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert next(rig.workers[0].half._backend._inner.submits) <= count + 3  # type: ignore[attr-defined]
    assert rig.as_pulled(REQUEST)
    assert right is not None


def test_an_aborted_request_fails_where_it_was_announced(rig: SendRig) -> None:
    announce(rig)
    rig.run(step({0: ids(1, 2)}, 32, 40))
    rig.end(cause="the client went away")
    eventually(lambda: rig.failures() == ["the client went away"])
    assert rig.quiesced()
    assert rig.sent() == [set()]
    announce(rig, attempt=1)
    eventually(lambda: len(rig.failures()) == 2)


def test_a_request_that_ran_out_of_time_is_told_and_freed(rig: SendRig) -> None:
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end(seconds=0.05)
    eventually(lambda: rig.all_sent("r"))
    announce(rig)
    (cause,) = eventually(rig.failures)
    assert "no longer kept" in cause


def test_blocks_are_not_freed_before_the_last_write_has_ended(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: worker.gates.opened)
    rig.end(seconds=0.0)
    eventually(lambda: rig.sent() and worker.half.pushing._outgoing.computed("x").over)  # type: ignore[union-attr]
    assert rig.sent() == [set()]
    worker.faults.release(0)
    eventually(lambda: rig.all_sent("r"))


# --- the device ---


def test_nothing_is_read_before_the_device_has_written_it() -> None:
    done: list[bool] = []
    with sending(dense("p"), dense("d")) as rig:
        rig.fill(REQUEST.remote)
        rig.workers[0].half.pushing._outgoing._record_event = lambda: lambda: bool(done)
        announce(rig)
        rig.run(step(REQUEST.remote, 40, 40))
        announce(rig, name="y")
        rig.workers[0].half.pushing._outgoing._record_event = lambda: None
        rig.run(step(REQUEST.remote, 40, 40, name="y", request_id="s"))
        eventually(lambda: len(rig.there(name="y")) == 2)
        assert not rig.there()
        done.append(True)
        eventually(lambda: len(rig.there()) == 2)


def test_a_step_without_pushes_notes_nothing(rig: SendRig) -> None:
    from kvd.worker.orders import StepOrders

    assert not rig.workers[0].half.pushing.begin(StepOrders())


def test_decoders_that_are_gone_make_room_for_others(rig: SendRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefiller, "MOST_SENDERS", 1)
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: len(rig.there()) == 2)
    pushing = rig.workers[0].half.pushing
    other = PushWithdraw(key=msgspec.structs.replace(rig.key(name="y"), decoder="e"))
    (refused,) = rig.send(other)
    assert isinstance(refused, Refused), "one that is there is not parted from"
    assert (
        "1 decoders are pushed to by p, which is as many as one prefiller takes: e is one" in refused.message
    )
    assert not refused.final, "room may be made before its time is up"
    assert "another prefiller" in refused.hint
    assert refused.code == "KVD-CONNECTOR-PUSH"
    (before,) = pushing._senders.values()
    rig.decoder_gone()
    eventually(lambda: before.idle)
    assert rig.send(other) == [Ok()]
    assert list(pushing._senders) == ["e"]
    eventually(lambda: not before._thread.alive)


def test_a_decoder_that_comes_back_is_pushed_to_again(rig: SendRig) -> None:
    pushing = rig.workers[0].half.pushing
    announce(rig, name="old")
    (before,) = pushing._senders.values()
    eventually(lambda: before._peer.remote is not None)
    rig.decoder_gone()
    eventually(lambda: before.idle)
    rig.workers[0].half._on_peer_changed("another")
    assert pushing._senders == {}
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: len(rig.there()) == 2)
    assert rig.as_pulled(REQUEST)


def test_closing_ends_what_is_under_way(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: worker.gates.opened)
    began = time.monotonic()
    worker.half.close()
    assert worker.gates.closed == 1
    assert time.monotonic() - began < 30
    (answer,) = announce(rig, name="y")
    assert isinstance(answer, Refused)
