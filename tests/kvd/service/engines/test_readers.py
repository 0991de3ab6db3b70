"""The readers that a kvd remembers of its own clients: bounds, and who is not certainly dead."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NoReturn

import pytest

from kvd.service.engines.local_engine import Client
from kvd.service.engines.readers import MAX_OF_UID, Reader, Readers
from kvd.service.errors import RequestRefused
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.wire.registration import OpenReader
from tests.support.daemons import facts

KEY = LeaseKey(engine_id="p", request_id="r")


def client(name: str = "d", uid: int = 1) -> Client:
    return Client(kind="scheduler", engine=facts(name), incarnation=name, pid=1, route=b"r", uid=uid)


def readers(sent: list[LeaseRelease]) -> Readers:
    async def send(message: LeaseRelease, _client: Client) -> None:
        sent.append(message)

    return Readers(send, Counter())


def gone(made: Readers, who: Client) -> None:
    async def run() -> None:
        made.client_gone(who)
        await asyncio.gather(*made._tasks.running)

    asyncio.run(run())


@pytest.mark.parametrize("ended", [True, False])
def test_only_what_has_certainly_ended_is_released(ended: bool) -> None:
    """A process that is not seen and sends no heartbeat may be stopped in the middle of a read."""
    sent: list[LeaseRelease] = []
    made, who = readers(sent), client()
    made.claims(who, LeaseClaim(key=KEY, reader="one"), 60.0)
    who.ended = ended
    gone(made, who)
    assert [(message.reader, message.result) for message in sent] == [("one", "aborted")] * ended
    assert not made.remembered


@pytest.mark.parametrize("ends", [False, True])
def test_a_long_list_of_claims_is_taken_one_slice_a_turn_and_released_whenever_its_client_ends(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.service.slices.SLICE_SECONDS", 0.0)
    sent: list[LeaseRelease] = []
    made, who = readers(sent), client()
    names = [f"reader-{number}" for number in range(30)]

    async def run() -> None:
        made.presents(who, [OpenReader(KEY, name, 60.0) for name in names])
        most = len(made.remembered)
        while len(made.remembered) < (10 if ends else 30):
            before = len(made.remembered)
            await asyncio.sleep(0)
            most = max(most, len(made.remembered) - before)
        assert most == 1
        who.state, who.ended = "gone", True
        made.client_gone(who)
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert sorted(message.reader for message in sent) == sorted(names)
    assert not made.remembered


def test_what_is_presented_anew_while_it_is_forgotten_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was silent is back before all that it had claimed was looked at."""
    monkeypatch.setattr("kvd.service.slices.SLICE_SECONDS", 0.0)
    made, who = readers([]), client()
    held = [OpenReader(KEY, f"reader-{number}", 60.0) for number in range(5)]

    async def run() -> None:
        for one in held:
            made.claims(who, LeaseClaim(key=KEY, reader=one.reader), 60.0)
        made.client_gone(who)
        made.presents(who, held)
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert sorted(made.remembered) == [one.reader for one in held]


def test_what_was_released_and_what_others_claimed_is_left_alone() -> None:
    sent: list[LeaseRelease] = []
    made, who = readers(sent), client()
    for reader in ("one", "two"):
        made.claims(who, LeaseClaim(key=KEY, reader=reader), 60.0)
    made.claims(client("e"), LeaseClaim(key=KEY, reader="three"), 60.0)
    made.released("one")
    made.promised("one", 60.0)
    who.ended = True
    gone(made, who)
    assert [message.reader for message in sent] == ["two"]
    assert list(made.remembered) == ["three"]


def test_what_the_dead_had_sent_before_claims_nothing() -> None:
    made, who = readers([]), client()
    who.ended, who.reason = True, "process 1 ended"
    with pytest.raises(
        RequestRefused, match=r"d/scheduler claims lease 'r', and it has ended: process 1 ended"
    ):
        made.claims(who, LeaseClaim(key=KEY, reader="one"), 60.0)


def claims(made: Readers, who: Client, number: int, seconds: float = 60.0) -> None:
    for one in range(number):
        made.claims(who, LeaseClaim(key=KEY, reader=f"{who.incarnation}-{one}"), seconds)


def test_the_memory_of_readers_is_bounded_by_number_and_by_time() -> None:
    made, who = readers([]), client()
    claims(made, who, MAX_OF_UID + 10)
    assert len(made.remembered) == MAX_OF_UID
    assert "d-9" not in made.remembered
    made = readers([])
    claims(made, who, 100, 0.0)
    assert len(made.remembered) <= 1


def test_the_memory_of_readers_is_bounded_by_what_their_names_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.service.engines.readers.MOST_BYTES_OF_UID", 10_000)
    monkeypatch.setattr("kvd.service.engines.readers.MOST_BYTES", 15_000)
    key = LeaseKey(engine_id="p", request_id="\U0001f600" * 250)
    made = readers([])
    for number in range(20):
        made.claims(client("d", 1), LeaseClaim(key=key, reader=f"d-{number}"), 60.0)
    assert list(made.remembered) == [f"d-{number}" for number in range(11, 20)]
    for number in range(20):
        made.claims(client("e", 2), LeaseClaim(key=key, reader=f"e-{number}"), 60.0)
    of = Counter(name.split("-")[0] for name in made.remembered)
    assert 13 <= of.total() <= 14, "of each 1,000 bytes and some"
    assert min(of.values()) >= 6, "who has most gives way"


def test_one_user_does_not_push_out_the_readers_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.service.engines.readers.MAX_OF_UID", 20)
    monkeypatch.setattr("kvd.service.engines.readers.MAX_REMEMBERED", 30)
    made, users = readers([]), [client(name, uid) for uid, name in enumerate("abc", 1)]
    claims(made, users[0], 10)
    claims(made, users[1], 25)
    claims(made, users[2], 10)
    of = Counter(name.split("-")[0] for name in made.remembered)
    assert of == {"a": 10, "b": 10, "c": 10}


class Untouched(dict[str, Reader]):
    """Readers that nobody may look at, neither at one nor at all."""

    def _looked(self, *_: object) -> NoReturn:
        raise AssertionError("a client that claimed nothing has readers looked at")

    __getitem__ = __iter__ = get = pop = keys = values = items = _looked


def test_clients_that_end_cost_what_they_had_claimed() -> None:
    made = readers([])
    claims(made, client("busy"), 20_000)

    async def end() -> None:
        kept, made.remembered = made.remembered, Untouched(made.remembered)
        for number in range(2000):
            made.client_gone(client(f"d{number}"))
        made.remembered = kept
        made.client_gone(client("busy"))
        async with asyncio.timeout(60):
            while made.remembered or made._of_client or made._of_user:  # noqa: ASYNC110 (its turns are looked at)
                await asyncio.sleep(0)

    asyncio.run(end())
    assert not made.remembered
    assert not made._of_client
    assert not made._of_user


def test_a_reader_that_another_client_has_is_left_alone() -> None:
    """To other hosts all clients of this one are the same."""
    made, mine, other = readers([]), client(), client("e")
    made.claims(mine, LeaseClaim(key=KEY, reader="one"), 60.0)
    made.presents(other, (OpenReader(KEY, "one", 60.0),))
    with pytest.raises(RequestRefused, match="another client here has") as refused:
        made.claims(other, LeaseClaim(key=KEY, reader="one"), 60.0)
    assert (refused.value.code, refused.value.final) == ("KVD-NOT-OWNER", True)
    with pytest.raises(RequestRefused, match="another client here has"):
        made.may_release(other, LeaseRelease(key=KEY, reader="one"))
    made.may_release(mine, LeaseRelease(key=KEY, reader="one"))
