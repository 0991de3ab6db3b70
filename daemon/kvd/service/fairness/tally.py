"""How much of something each has, where nobody who has nothing any more is to be remembered."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Tally(Generic[K]):
    """A number for each key, and their ``total``. ``of`` has no zeros."""

    __slots__ = ("of", "total")

    def __init__(self) -> None:
        self.of: dict[K, int] = {}
        self.total = 0

    def __getitem__(self, key: K) -> int:
        return self.of.get(key, 0)

    def add(self, key: K, amount: int = 1) -> None:
        """So much more for ``key``, or less."""
        self.total += amount
        if now := self.of.get(key, 0) + amount:
            self.of[key] = now
        else:
            self.of.pop(key, None)


def beyond(users: Tally[int], what: str, uid: int, more: int, bounds: tuple[int, int]) -> str:
    """Which bound ``more`` of a user's would be over, as an error says it; empty where none.

    ``bounds`` are the most of one user and the most of all.
    """
    for has, most, whose in (
        (users[uid], bounds[0], f"uid {uid} has"),
        (users.total, bounds[1], "all users have"),
    ):
        if has + more > most:
            return f"{whose} {has} {what}, at most {most} are kept"
    return ""
