"""Checksums of what is handed over: two real kvds, real workers on both sides, and memory that changes in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvctl.cli.units import Mode
from kvd.backends.memory import open_backend
from kvd.client.session import KvdSession
from kvd.geometry.rank import Rank
from kvd.topology.checksums.sums import InMemory
from kvd.vllm.memory.page_sums import summer_of
from kvd.vllm.memory.tensors import sibling_geometries, worker_geometry
from kvd.wire.checksum import GetSums, Sums, SumsOf
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Refused
from kvd.wire.transfer import ListTransfers, TransferList, TransferRecord
from kvd.worker.orders import LoadOrder, PushEnd, PushStep, StepOrders, SumOrder, SumOrders
from kvd.worker.reporting import Results
from kvd.worker.settings import ConnectorSettings
from kvd.worker.worker import WorkerHalf
from tests.support.daemons import Daemon, daemons, scheduler, session, wait_for
from tests.support.rigs.bench import cache_config, eventually, facts, full, groups_of, order, place, prefill
from tests.support.rigs.pull import BLOCKS, ELEMENTS, Buffer, gather, memory
from tests.support.slow_sums import LONG, Slow

NAME = "p-1"


@dataclass
class Side:
    """A worker with a session of its own at a kvd."""

    buffer: Buffer
    half: WorkerHalf
    session: KvdSession


@contextmanager
def worker(kvd: Daemon, name: str, mode: Mode) -> Iterator[Side]:
    config = cache_config(BLOCKS, (full(), ("l0", "l1")))
    buffer, tensors = memory(2)
    groups = groups_of(config)
    sessions: list[KvdSession] = []

    def open_session(card: Any, on_push: Any) -> KvdSession:
        sessions.append(KvdSession(card, on_push, directory=kvd.directory, name=name))
        return sessions[0]

    half = WorkerHalf(
        ConnectorSettings(backend="memory", mode=mode, probe=False),
        facts(name, len(groups)),
        worker_geometry(tensors, config, groups, place()),
        sibling_geometries(tensors, config, groups, place()),
        open_backend(name, options={}),
        open_session,
        memory=tensors,
    )
    try:
        yield Side(buffer, half, sessions[0])
    finally:
        half.close()


@dataclass
class Pair:
    p: Side
    d: Side
    near: Daemon
    generation: str
    endpoint: Endpoint

    def prefilled(self, tokens: int = 8, name: str = NAME) -> None:
        """A prompt in the prefiller's blocks 2 and 3; wait until it is added up."""
        self.ordered(tokens, name)
        eventually(lambda: self.p.half._summing._kept[name].done)

    def ordered(self, tokens: int = 8, name: str = NAME) -> None:
        sums = [SumOrder(name, name, {0: (0, (2, 3))}, tokens)]
        self.p.half.start(StepOrders(sums=SumOrders(sums)))
        self.p.half.stepped()

    def load(
        self, tokens: int = 8, *, total: int = 8, seconds: float = LONG, checksum: bool = True
    ) -> Results:
        remote = msgspec.structs.replace(
            prefill(((2, 3),), generation=self.generation, tokens=total),
            host=self.endpoint.host,
            port=self.endpoint.port,
            checksum=checksum,
        )
        made: LoadOrder = replace(order(remote, (5, 6), seconds=seconds), tokens=tokens)
        self.d.half.start(StepOrders(loads=[made]))
        return gather(self.d.half, 1)

    def record(self) -> TransferRecord:
        def look() -> TransferRecord | None:
            answer = self.near.ask(ListTransfers())
            assert isinstance(answer, TransferList)
            return answer.rows[0].record if answer.rows else None

        return wait_for(look, LONG)


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Mode:
    """Pulls, where a test says nothing else."""
    return getattr(request, "param", "pull")


@pytest.fixture
def pair(mode: Mode) -> Iterator[Pair]:
    with (
        daemons(2) as (far, near),
        worker(far, "p", mode) as p,
        session(far, scheduler(facts("p"))),
        worker(near, "d", mode) as d,
        session(near, scheduler(facts("d"))),
    ):
        p.buffer[:] = np.arange(len(p.buffer)) % 65535 + 1
        generation = p.session.wait(lambda s: bool(s.engine_generation), LONG).engine_generation
        d.session.wait(lambda s: bool(s.engine_generation), LONG)
        yield Pair(p, d, near, generation, far.endpoint)


def test_a_load_that_brought_what_was_prefilled_is_compared_and_done(pair: Pair) -> None:
    pair.prefilled()
    assert not pair.load().failed
    found = pair.record().checksum
    assert not found.why
    assert (found.state, [(g.group, g.layers, g.differs) for g in found.groups]) == ("ok", [(0, 2, "")])
    assert pair.near.status().counters["checksums.ok"] == 1


def test_blocks_that_were_overwritten_before_they_were_read_are_a_miss(pair: Pair) -> None:
    pair.prefilled()
    pair.p.buffer.reshape(2, BLOCKS, 2, 4, 8)[1, 3, 1, 2, 5] ^= 4
    results = pair.load()
    assert results.failed == {"d-1"}
    assert results.bad_blocks == {5, 6}
    record = pair.record()
    assert (record.state, record.code) == ("miss", "CHECKSUM_MISMATCH")
    assert record.cause.startswith("checksums differ from the prefiller's: group 0 layer l1 v head 1: 0x")
    assert " there, 0x" in record.cause
    assert record.checksum.state == "differs"
    assert record.checksum.groups[0].layers == 2
    assert pair.near.status().counters["checksums.differs"] == 1


def test_nothing_of_a_load_that_differs_is_claimed_again(pair: Pair) -> None:
    pair.prefilled()
    pair.p.buffer.reshape(2, BLOCKS, ELEMENTS)[0, 2, 0] ^= 1
    assert pair.load().failed
    outcomes = pair.d.half.outcomes()
    assert outcomes is not None
    assert outcomes.prefixes == {"d-1": 0}


def test_what_the_prefiller_does_not_add_up_is_not_compared(pair: Pair) -> None:
    assert not pair.load(checksum=False).failed
    assert pair.record().checksum.state == ""


def test_sums_that_are_gone_are_no_miss(pair: Pair) -> None:
    pair.prefilled()
    pair.p.half.start(StepOrders(freed=[NAME]))
    assert not pair.load().failed
    found = pair.record().checksum
    assert found.state == "unknown"
    assert "no checksums are kept of request p-1" in found.why
    assert pair.near.status().counters["checksums.unknown"] == 1


def test_sums_of_more_tokens_than_the_params_say_are_not_taken_for_an_error(pair: Pair) -> None:
    pair.prefilled(tokens=7)
    assert not pair.load().failed
    assert "has checksums of 7 tokens, its blocks hold 8" in pair.record().checksum.why


def test_a_block_of_which_less_is_loaded_is_left_out(pair: Pair) -> None:
    pair.prefilled()
    pair.p.buffer.reshape(2, BLOCKS, 2, 4, 8)[:, 3] ^= 1
    assert not pair.load(tokens=6).failed
    assert pair.record().checksum.state == "ok"


def test_tokens_that_are_computed_after_the_prompt_do_not_count(pair: Pair) -> None:
    pair.prefilled(tokens=6)
    pair.p.buffer.reshape(2, BLOCKS, 2, 4, 8)[:, 3, :, 2:] ^= 1
    assert not pair.load(tokens=6, total=6).failed
    assert pair.record().checksum.state == "ok"


@pytest.fixture
def slow(pair: Pair) -> Iterator[Slow]:
    summer = summer_of(pair.p.half.geometry)
    assert isinstance(summer, InMemory)
    made = Slow(summer)
    pair.p.half._summing._summer = lambda: made
    yield made
    made.go.set()


def test_the_decoder_asks_again_until_the_prefiller_has_added_up(
    pair: Pair, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, answers = pair.p.half._summing.answer, []

    def answer(message: GetSums) -> Sums | Refused:
        answers.append(really(message))
        slow.go.set()
        return answers[-1]

    monkeypatch.setattr(pair.p.half._summing, "answer", answer)
    pair.ordered()
    assert not pair.load().failed
    assert pair.record().checksum.state == "ok"
    assert isinstance(answers[0], Refused)
    assert isinstance(answers[-1], Sums)


def test_sums_that_do_not_come_in_time_are_no_miss(pair: Pair, slow: Slow) -> None:
    pair.ordered()
    assert not pair.load(seconds=2.0).failed
    found = pair.record().checksum
    assert found.state == "unknown"
    assert "are not ready" in found.why or "no answer in time" in found.why
    assert not slow.go.is_set()


def test_another_generation_of_the_prefiller_has_no_sums(pair: Pair) -> None:
    pair.prefilled()
    ask = GetSums(
        engine_id="p", generation="before", endpoint=pair.endpoint, rank=Rank(0), request_id=NAME,
        wanted=(SumsOf(0, 0, 2),),
    )  # fmt: skip
    future = pair.d.session.call(ask, LONG)
    assert "asked for was before" in str(future.exception(LONG))


# --- pushes ---


def pushed(pair: Pair, *, overwritten: bool) -> Results:
    """The prefiller computes a prompt that is pushed; its memory changes once it is added up, before it is sent."""
    remote = msgspec.structs.replace(
        prefill((), request_id="", generation=pair.generation),
        host=pair.endpoint.host,
        port=pair.endpoint.port,
    )
    made = replace(order(remote, (5, 6), seconds=LONG), transfer_id="x")
    step = PushStep("x", "r", {0: (0, (2, 3))}, 8, 8, sums=True)
    orders = StepOrders(pushes=[step], sums=SumOrders([SumOrder("x", "r", {0: (0, (2, 3))}, 8)]))
    prefiller = pair.p.half
    prefiller.pushing.begin(orders)
    prefiller.start(orders)
    prefiller.stepped()
    eventually(lambda: prefiller._summing._kept["x"].done)
    if overwritten:
        pair.p.buffer.reshape(2, BLOCKS, ELEMENTS)[0, 3, 7] ^= 1
    prefiller.pushing.stepped()
    prefiller.pushing.begin(StepOrders(push_ends=[PushEnd("x", "r", LONG)]))
    pair.d.half.start(StepOrders(loads=[made]))
    return gather(pair.d.half, 1)


@pytest.mark.parametrize("mode", ["push"], indirect=True)
def test_a_push_is_compared_when_its_last_layer_has_come(pair: Pair) -> None:
    assert not pushed(pair, overwritten=False).failed
    record = pair.record()
    assert (record.mode, record.checksum.state, record.checksum.why) == ("push", "ok", "")
    assert record.checksum.groups[0].layers == 2
    eventually(lambda: pair.p.half.results().sent == {"r"})


@pytest.mark.parametrize("mode", ["push"], indirect=True)
def test_a_push_of_what_was_overwritten_is_a_miss(pair: Pair) -> None:
    assert pushed(pair, overwritten=True).failed == {"d-1"}
    record = pair.record()
    assert (record.state, record.code, record.checksum.state) == ("miss", "CHECKSUM_MISMATCH", "differs")
