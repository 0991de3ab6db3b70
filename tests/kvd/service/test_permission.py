"""Who may what on this host: the policy as a table, and the system's user database asked once."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import threading
import time

import pytest

from kvd.service import permission
from kvd.service.permission import EVERYTHING, Operators, ReadAccess, Sight

KVD = os.geteuid()
ALICE, BOB = 70_001, 70_002
"""Alice is a member of group ops."""


@pytest.fixture(autouse=True)
def _users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission, "belongs", lambda uid, group: (uid, group) == (ALICE, "ops"))


@pytest.mark.parametrize(
    ("uid", "group", "operator"),
    [
        (0, "", True),
        (KVD, "", True),
        (0, "ops", True),
        (ALICE, "ops", True),
        (ALICE, "", False),
        (ALICE, "others", False),
        (BOB, "ops", False),
        (-1, "ops", False),
    ],
)
def test_who_is_an_operator(uid: int, group: str, operator: bool) -> None:
    assert asyncio.run(Operators().has(uid, group)) is operator


@pytest.mark.parametrize(
    ("uid", "read", "owner", "seen"),
    [
        (BOB, "all", BOB, True),
        (BOB, "all", ALICE, True),
        (BOB, "own", BOB, True),
        (BOB, "own", ALICE, False),
        (BOB, "own", 0, False),
        (ALICE, "own", BOB, True),
        (0, "own", BOB, True),
        (KVD, "own", BOB, True),
        (-1, "own", -1, False),
        (-1, "own", BOB, False),
        (-1, "all", BOB, True),
    ],
)
def test_who_sees_what_is_of_whose_engine(uid: int, read: ReadAccess, owner: int, seen: bool) -> None:
    sight = asyncio.run(Operators().sight(uid, read, "ops"))
    assert sight.of(owner) is seen


def test_other_kvds_see_all() -> None:
    assert EVERYTHING.of(ALICE)
    assert not Sight(-1, everything=False).of(-1)


def test_the_user_database_is_asked_once_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    go_on = threading.Event()

    def slow(uid: int, _group: str) -> bool:
        asked.append(uid)
        assert go_on.wait(10)
        return True

    monkeypatch.setattr(permission, "belongs", slow)

    async def ask() -> list[bool]:
        operators = Operators()
        waiting = [asyncio.create_task(operators.has(BOB, "ops")) for _ in range(100)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        go_on.set()
        found = await asyncio.gather(*waiting[1:])
        return [*found, await operators.has(BOB, "ops")]

    assert asyncio.run(ask()) == [True] * 100
    assert asked == [BOB]


def test_a_user_database_that_hangs_makes_nobody_a_member_and_holds_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, asked = threading.Event(), list[int]()

    def hanging(uid: int, _group: str) -> bool:
        asked.append(uid)
        go_on.wait(60)
        return True

    monkeypatch.setattr(permission, "belongs", hanging)
    monkeypatch.setattr(permission, "LOOK_SECONDS", 0.05)

    async def ask() -> list[bool]:
        operators = Operators()
        answers = await asyncio.gather(*(operators.has(BOB + one, "ops") for one in range(100)))
        return [*answers, await operators.has(BOB, "ops")]

    began = time.monotonic()
    assert asyncio.run(ask()) == [False] * 101
    assert time.monotonic() - began < 5
    assert len(asked) == permission.MOST_LOOKUPS
    go_on.set()


def test_membership_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    user = pwd.getpwuid(os.getuid())
    assert permission.belongs(user.pw_uid, grp.getgrgid(user.pw_gid).gr_name)
    assert not permission.belongs(BOB, "no such group")
