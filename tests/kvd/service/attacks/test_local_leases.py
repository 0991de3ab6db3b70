"""Whoever may read the events knows the ids of requests: another user ends no lease by one, and keeps none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from kvd.wire.frame import Message
from kvd.wire.identity import LeaseKey
from kvd.wire.lease import LeaseClaim, LeaseClaimed, LeaseExtend, LeaseOpened, LeaseRelease
from kvd.wire.registration import OpenLease, Registered
from kvd.wire.reply import Ok
from tests.support.daemons import Daemon, facts, scheduler, session
from tests.support.other_user import OtherUser, needs_root, other_user, shared_kvd

pytestmark = needs_root
STRANGER = 61_002


@pytest.fixture(scope="module")
def host() -> Iterator[Daemon]:
    with shared_kvd() as kvd:
        yield kvd


@contextmanager
def prefiller(host: Daemon) -> Iterator[tuple[LeaseKey, OtherUser, OtherUser, list[float]]]:
    """A lease of 60 s of this user's prefiller, another user's engine, an own one, and what its owner was asked for.

    The prefiller's scheduler confirms whatever it is asked.
    """
    asked: list[float] = []

    def confirm(message: Message) -> Message | None:
        if not isinstance(message, LeaseExtend):
            return None
        asked.append(message.seconds)
        return LeaseClaimed(request_id=message.request_id, seconds=message.seconds)

    engine = f"p-{uuid4().hex[:6]}"
    with (
        session(host, scheduler(facts(engine)), confirm) as owner,
        other_user(host, STRANGER) as stranger,
        other_user(host, 0) as own,
    ):
        opened = LeaseOpened(engine_id=engine, leases=(OpenLease("r", 60.0, 3),))
        assert owner.call(opened, 5.0).result(10.0) == Ok()
        for who, name in ((stranger, "x"), (own, "o")):
            assert isinstance(who.ask(scheduler(facts(f"{name}-{engine}"))), Registered)
        yield LeaseKey(engine_id=engine, request_id="r"), stranger, own, asked


def claim(who: OtherUser, key: LeaseKey, reader: str, seconds: float) -> float:
    claimed = who.ask(LeaseClaim(key=key, reader=reader, extend_seconds=seconds))
    assert isinstance(claimed, LeaseClaimed)
    return claimed.seconds


def test_a_stranger_ends_no_lease_of_an_engine_whose_card_it_was_not_given(host: Daemon) -> None:
    with prefiller(host) as (key, stranger, own, _):
        assert stranger.ask(LeaseRelease(key=key, reader="never claimed")) == Ok()
        assert host.engines()[key.engine_id].leases == 1
        assert claim(stranger, key, "claimed", 0.0) > 0
        assert stranger.ask(LeaseRelease(key=key, reader="claimed")) == Ok()
        assert host.engines()[key.engine_id].leases == 1
        assert own.ask(LeaseRelease(key=key, reader="its own")) == Ok()
        assert host.engines()[key.engine_id].leases == 0, "an engine of its own user ends it"


def test_a_strangers_claims_keep_no_memory_for_longer_than_its_owner_does_unasked(host: Daemon) -> None:
    with prefiller(host) as (key, stranger, own, asked):
        for reader in ("one", "two"):
            assert 50 < claim(stranger, key, reader, 3600.0) < 60
        assert not asked
        assert claim(own, key, "three", 100.0) > 99
        assert len(asked) == 1
        assert claim(stranger, key, "one", 3600.0) < 60, "nor for what another has asked"
