"""Parts of large cards: so many at a time that no connection ends for what waits, and hosts take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from kvd.service.errors import RequestRefused
from kvd.service.peers import giving
from kvd.service.peers.giving import MOST_GIVEN, PartsGiven
from kvd.service.sockets.fair_lines import ASKER
from kvd.service.sockets.limits import share_of


class Hosts:
    """Other kvds, each with a connection of its name; they read when they are told to."""

    def __init__(self) -> None:
        self.unread: Counter[bytes] = Counter()
        self.given: list[bytes] = []
        self.parts = PartsGiven(lambda route: self.unread[route])

    def asks(self, host: bytes) -> asyncio.Task[None]:
        """A host wants a part."""
        ASKER.set(host)
        return asyncio.get_running_loop().create_task(self._give(host))

    async def _give(self, host: bytes) -> None:
        await self.parts.turn(host)
        self.unread[host] += 1
        self.given.append(host)

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not look():  # noqa: ASYNC110 (what is looked at sets no event)
                await asyncio.sleep(0.001)


def gives(talk: Callable[[Hosts], Awaitable[None]]) -> None:
    async def run() -> None:
        await talk(Hosts())

    asyncio.run(run())


def test_of_hundreds_of_hosts_some_are_given_parts_at_a_time_and_all_in_the_end() -> None:
    async def talk(hosts: Hosts) -> None:
        asked = [hosts.asks(b"%d" % number) for number in range(300)]
        await asyncio.sleep(3 * giving.LOOK_SECONDS)
        assert len(hosts.given) == MOST_GIVEN, "nobody has read anything"
        while not all(task.done() for task in asked):
            assert hosts.unread.total() <= MOST_GIVEN
            hosts.unread.clear()
            await asyncio.sleep(giving.LOOK_SECONDS)
        assert sorted(hosts.given) == sorted(b"%d" % number for number in range(300))

    gives(talk)


def test_one_that_asks_for_much_and_reads_nothing_leaves_places_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(giving, "GIVEN_SECONDS", 0.2)

    async def talk(hosts: Hosts) -> None:
        much = [hosts.asks(b"hostile") for _ in range(100)]
        await asyncio.sleep(0)
        await hosts.asks(b"honest")
        assert hosts.given == [b"hostile"] * share_of(MOST_GIVEN) + [b"honest"]
        await hosts.until(lambda: len(hosts.given) > share_of(MOST_GIVEN) + 1)
        for task in much:
            task.cancel()

    gives(talk)


def test_who_is_gone_stands_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "MOST_WAITING", 4)

    async def talk(hosts: Hosts) -> None:
        held = [hosts.asks(b"one") for _ in range(share_of(MOST_GIVEN))]
        await asyncio.gather(*held)
        gone = [hosts.asks(b"one") for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="3 wait for one user or host already"):
            await hosts.asks(b"one")
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        last = hosts.asks(b"one")
        hosts.unread.clear()
        await last

    gives(talk)
