"""The decoders that a prefilling worker writes to: withdrawn, dead, refused, failing, and closed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.backends.errors import BackendError
from kvd.client.errors import RefusedByDaemon
from kvd.wire.handshake import GetPeer
from kvd.wire.push import PushProgress
from kvd.wire.reply import Ok, Refused
from kvd.worker import unclosed
from kvd.worker.push import computed as outgoing
from kvd.worker.push import send_step as transmit
from tests.support import oracle
from tests.support.rigs.bench import eventually
from tests.support.rigs.dense import REQUEST, announce, dense, ids
from tests.support.rigs.send import SendRig, sending, step


@pytest.fixture
def rig() -> Iterator[SendRig]:
    with sending(dense("p"), dense("d")) as made:
        made.fill(REQUEST.remote)
        yield made


# --- the decoder goes away ---


def test_a_withdrawn_target_is_quiet_when_its_write_has_ended(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 32, 40))
    eventually(lambda: worker.gates.opened)
    rig.withdraw()
    rig.run(step(REQUEST.remote, 40, 40, held=32))
    assert not rig.quiesced()
    worker.faults.release(0)
    eventually(rig.quiesced)
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert not rig.there()


def test_a_write_that_does_not_end_is_left_to_the_decoders_window(
    rig: SendRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lane is closed, but that stops nothing that is on its way: so nobody is told that it is quiet."""
    monkeypatch.setattr(transmit, "QUIESCE_SECONDS", 0.05)
    announce(rig)
    announce(rig, name="y")
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: worker.gates.opened)
    rig.withdraw()
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    eventually(lambda: worker.gates.closed == 1)
    rig.run(step(REQUEST.remote, 40, 40, name="y", request_id="s"))
    eventually(lambda: len(rig.there(name="y")) == 2)
    assert not rig.quiesced()


def test_a_transfer_that_nobody_knows_is_quiet_and_stays_withdrawn(rig: SendRig) -> None:
    rig.withdraw()
    eventually(rig.quiesced)
    announce(rig)  # on another way, hence later
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert rig.as_pulled(oracle.Request({}, REQUEST.remote, 40))


def test_a_new_attempt_gets_everything_again(rig: SendRig) -> None:
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: len(rig.there()) == 2)
    for region in rig.targets[0].regions:
        region[:] = oracle.UNTOUCHED
    announce(rig, attempt=1)
    eventually(lambda: [p.key.attempt for p in rig.progress()][-1:] == [1])
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert rig.as_pulled(REQUEST)


def test_the_same_announcement_again_changes_nothing(rig: SendRig) -> None:
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: len(rig.there()) == 2)
    announce(rig, seconds=12.0)
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    announce(rig, seconds=11.0)
    announce(rig, name="y")
    rig.run(step(REQUEST.remote, 40, 40, name="y", request_id="s"))
    eventually(lambda: len(rig.there(name="y")) == 2)
    assert not rig.failures()


def test_a_dead_decoder_is_owed_nothing(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: worker.gates.opened)
    rig.end()
    assert rig.sent() == [set()]
    rig.decoder_gone()
    eventually(lambda: rig.all_sent("r"))
    eventually(lambda: worker.gates.closed == 1)


def test_a_worker_that_declined_counts_as_one_that_has_its_part() -> None:
    with sending(dense("p"), dense("d", tp=2)) as rig:
        rig.fill(REQUEST.remote)
        rig.withdraw(worker=0)
        rig.withdraw(worker=1)
        rig.run(step(REQUEST.remote, 40, 40))
        rig.end()
        eventually(lambda: rig.all_sent("r"))


# --- what goes wrong ---


def test_a_post_that_failed_may_still_land_so_its_target_fails_and_is_not_quiet(rig: SendRig) -> None:
    announce(rig)
    announce(rig, name="y")
    worker = rig.workers[0]
    worker.faults.late |= {0}
    rig.run(step(REQUEST.remote, 40, 40))
    (cause,) = eventually(rig.failures)
    assert "land late" in cause
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    rig.run(step(REQUEST.remote, 40, 40, name="y", request_id="s"))
    eventually(lambda: len(rig.there(name="y")) == 2)
    assert not rig.quiesced()


def test_a_failure_of_one_leaves_what_others_have_under_way(rig: SendRig) -> None:
    announce(rig)
    announce(rig, name="y")
    worker = rig.workers[0]
    worker.faults.hold |= {0}
    worker.faults.fail_after[1] = 1
    rig.run(step(REQUEST.remote, 40, 40))
    eventually(lambda: worker.gates.opened)
    rig.run(step(REQUEST.remote, 40, 40, name="y", request_id="s"))
    eventually(lambda: rig.failures(name="y"))
    assert worker.gates.closed == 0
    worker.faults.release(0)
    eventually(lambda: len(rig.there()) == 2)
    eventually(lambda: worker.gates.closed == 1)
    assert rig.as_pulled(REQUEST)


def test_a_post_that_could_not_be_started_is_repeated_on_a_new_lane(rig: SendRig) -> None:
    announce(rig)
    worker = rig.workers[0]
    worker.faults.refuse |= {0, 1}
    rig.run(step(REQUEST.remote, 40, 40))
    rig.end()
    eventually(lambda: rig.all_sent("r"))
    assert worker.gates.opened >= 3
    assert rig.as_pulled(REQUEST)


def test_a_target_fails_for_good_after_three_failures_and_others_go_on(rig: SendRig) -> None:
    worker = rig.workers[0]
    worker.faults.refuse |= {0, 1, 2}
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40))
    (cause,) = eventually(rig.failures)
    assert "refused" in cause
    announce(rig, name="y")
    rig.run(step(REQUEST.remote, 40, 40, name="y", request_id="s"))
    eventually(lambda: len(rig.there(name="y")) == 2)


def test_a_lane_that_cannot_be_closed_is_tried_again(rig: SendRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unclosed, "RETRY_SECONDS", 0.05)
    worker = rig.workers[0]
    worker.faults.refuse |= {0}
    worker.gates.close_errors.append(BackendError("it is stuck"))
    announce(rig)
    rig.run(step(REQUEST.remote, 40, 40))
    assert worker.gates.close_tried.wait(10)
    eventually(lambda: len(rig.there()) == 2)
    worker.gates.close_errors.clear()
    eventually(lambda: worker.gates.closed == 1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tokens": 41}, "prompt has 40 tokens, announced were 41"),
        (
            {"generations": ("gen-1", "older")},
            "decoder d is generation d-gen now, the announcement is of generation older",
        ),
    ],
)
def test_an_announcement_that_does_not_fit_fails_with_both_values(
    rig: SendRig, more: dict[str, object], words: str
) -> None:
    tokens = more.pop("tokens", 40)
    rig.announce(REQUEST.local, tokens, **more)  # type: ignore[arg-type]
    rig.run(step(REQUEST.remote, 40, 40))
    (cause,) = eventually(rig.failures)
    assert words in cause


def test_an_announcement_to_another_life_of_this_engine_is_refused(rig: SendRig) -> None:
    (answer,) = announce(rig, generations=("gen-0", "d-gen"))
    assert isinstance(answer, Refused)
    assert answer.final
    assert "gen-1, announced to was generation gen-0" in answer.message


def test_blocks_beyond_the_decoders_memory_fail(rig: SendRig) -> None:
    rig.announce({0: ids(1, 2, 99)}, 40)
    rig.run(step(REQUEST.remote, 40, 40))
    (cause,) = eventually(rig.failures)
    assert "block ids" in cause


def test_a_decoder_that_kvd_does_not_know_fails_with_its_words(rig: SendRig) -> None:
    refusal = Refused(code="KVD-PEER-UNREACHABLE", message="kvd at d:2 does not answer")
    rig.workers[0].wire.refuse = RefusedByDaemon(refusal)
    announce(rig)
    assert eventually(rig.failures) == ["decoder d: kvd at d:2 does not answer"]
    (asked,) = rig.workers[0].wire.asked(GetPeer)
    assert (asked.message.local_engine, asked.message.endpoint.host) == ("p", "d")


def test_a_request_that_never_comes_is_forgotten_in_time(rig: SendRig) -> None:
    announce(rig, seconds=0.05)
    assert eventually(rig.failures) == ["the prefiller was not sent this request in time"]


def test_what_the_decoder_has_not_heard_is_said_again_with_what_is_new(rig: SendRig) -> None:
    wire = rig.workers[0].wire
    wire.lost = True
    announce(rig)
    rig.begin(step(REQUEST.remote, 40, 40))
    rig.hook("a")
    eventually(lambda: rig.there() == {("a", 40)})
    rig.hook("b")
    eventually(lambda: len(rig.progress()) >= 2)
    last = rig.progress()[-1]
    assert {layer for part in last.there for layer in part.layers} == {"a", "b"}
    assert len({asked.key for asked in wire.delivered if isinstance(asked.message, PushProgress)}) == 1


def test_too_many_announcements_are_refused(rig: SendRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "MOST_TRANSFERS", 2)
    assert [type(announce(rig, name=name)[0]) for name in "xyz"] == [Ok, Ok, Refused]
