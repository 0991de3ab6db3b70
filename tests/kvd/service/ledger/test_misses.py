"""Misses as kvd takes them: codes of the list alone, and from a scheduler only its own engine's."""

from __future__ import annotations

import msgspec
import pytest

from kvd.client.errors import RefusedByDaemon
from kvd.client.session import KvdSession
from kvd.wire.registration import RegisterScheduler, RegisterWorker
from kvd.wire.reply import Ok
from kvd.wire.transfer import SCHEDULER_RANK, ListTransfers, ReportTransfers, TransferList, TransferRecord
from tests.support.daemons import Daemon, daemons, facts, scheduler, session, worker
from tests.support.ledgers import record

D = facts("d")


def unloaded(number: int, engine: str = "d", **changes: object) -> TransferRecord:
    made = msgspec.structs.replace(
        record(number, "miss", engine),
        transfer_id=f"r{number}@{SCHEDULER_RANK}",
        local_rank=SCHEDULER_RANK,
        code="PROMPT_MISMATCH",
        cause="another prompt",
    )
    return msgspec.structs.replace(made, **changes)


def report(client: KvdSession, *records: TransferRecord) -> object:
    return client.call(ReportTransfers(incarnation="i", records=records), 10).result(10)


def rows(kvd: Daemon, **query: str) -> list[TransferRecord]:
    answer = kvd.ask(ListTransfers(**query))  # type: ignore[arg-type]
    assert isinstance(answer, TransferList)
    return [row.record for row in answer.rows]


def test_a_scheduler_reports_misses_that_no_worker_knows() -> None:
    card = scheduler(D)
    with daemons() as (kvd,), session(kvd, worker(D)) as hand, session(kvd, card) as head:
        hand.wait(lambda s: bool(s.engine_generation), 10)
        message = ReportTransfers(incarnation=card.incarnation, records=(unloaded(1),))
        assert head.call(message, 10).result(10) == Ok()
        (found,) = rows(kvd, code="PROMPT_MISMATCH")
        assert (found.local_rank, found.request_id, found.state) == (SCHEDULER_RANK, "r1", "miss")
        assert found.local_generation == hand.state.engine_generation
        assert head.call(message, 10).result(10) == Ok(), "it is sent until it is answered"
        assert len(rows(kvd)) == 1
        assert kvd.status().counters["misses.PROMPT_MISMATCH"] == 1
        assert rows(kvd, code="TOO_LATE") == []


@pytest.mark.parametrize(
    ("who", "what"),
    [
        ("another engine's scheduler", unloaded(1)),
        ("a worker", unloaded(1)),
        ("its scheduler", unloaded(1, state="done", code="", cause="")),
    ],
)
def test_nobody_else_reports_them(who: str, what: TransferRecord) -> None:
    cards: dict[str, RegisterWorker | RegisterScheduler] = {
        "another engine's scheduler": scheduler(facts("e"), incarnation="i"),
        "a worker": worker(D, incarnation="i"),
        "its scheduler": scheduler(D, incarnation="i"),
    }
    with daemons() as (kvd,), session(kvd, cards[who]) as client:
        with pytest.raises(RefusedByDaemon) as error:
            report(client, what)
        assert (error.value.code, error.value.refusal.final) == ("KVD-NOT-OWNER", True)
        assert rows(kvd) == []


def test_who_is_not_registered_is_to_register_and_say_it_again() -> None:
    with daemons() as (kvd,):
        refused = kvd.ask_refused(ReportTransfers(incarnation="i", records=(unloaded(1),)))
        assert (refused.code, refused.final) == ("KVD-NOT-REGISTERED", False)


def test_codes_that_are_none_of_ours_are_counted_as_one() -> None:
    with daemons() as (kvd,), session(kvd, worker(D, incarnation="i")) as hand:
        strange = [msgspec.structs.replace(record(n, "miss"), code=f"MADE_UP_{n}") for n in range(50)]
        done = msgspec.structs.replace(record(99), code="TOO_LATE")
        report(hand, *strange, record(98, "miss"), done)
        counters = kvd.status().counters
        assert {name: count for name, count in counters.items() if name.startswith("misses.")} == {
            "misses.UNKNOWN": 51
        }
        assert {r.code for r in rows(kvd, state="miss")} == {"UNKNOWN"}
        assert [r.code for r in rows(kvd, state="done")] == [""]
