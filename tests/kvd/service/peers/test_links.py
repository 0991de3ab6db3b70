"""The links to other kvds, by endpoint: whoever needs one, and their end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, cast

from kvd.service.config import PeerSettings
from kvd.service.peers.links import PeerLinks
from kvd.service.peers.listener import Listener
from kvd.service.sockets.channel import SocketContext
from kvd.service.sockets.dialling import Dialler
from kvd.service.sockets.events import Events
from kvd.service.sockets.fair_lines import ASKER
from kvd.service.sockets.resolver import THREADS, Address, Resolver
from kvd.wire.handshake import Ping
from kvd.wire.identity import Endpoint


class Nobody:
    """Stands for who is told of what links see."""

    def __getattr__(self, _name: str) -> Callable[..., tuple[()]]:
        return lambda *_: ()


def linked(look: Callable[[str], list[Address]], talk: Callable[[PeerLinks], Awaitable[None]]) -> None:
    async def run() -> None:
        dialler = Dialler(cast("SocketContext", None), 1 << 20, Resolver(look))
        links = PeerLinks(
            dialler, PeerSettings(), None, Events(None, Counter()), Ping(kvd_id="a", kvd_generation="g"), 2048,
            Endpoint("127.0.0.1", 1),
        )  # fmt: skip
        links.listener = cast("Listener", Nobody())
        await talk(links)
        await links.close()
        assert not links.links

    asyncio.run(run())


def name(links: PeerLinks, asker: Hashable, *hosts: str) -> None:
    """Somebody needs links to these hosts."""
    before = ASKER.set(asker)
    for host in hosts:
        links.get(Endpoint(host, 7400))
    ASKER.reset(before)


def test_a_host_is_looked_up_for_whoever_needs_it_though_others_named_it_among_many_first() -> None:
    """One user names more dead hosts than there are threads, and then the host that another one needs."""
    end, found = threading.Event(), threading.Event()

    def look(host: str) -> list[Address]:
        if host == "prefiller":
            found.set()
        else:
            end.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async def talk(links: PeerLinks) -> None:
        name(links, "hostile", *(f"dead-{n}" for n in range(2 * THREADS["new"])), "prefiller")
        await asyncio.sleep(0.02)
        assert not found.is_set()
        name(links, "honest", "prefiller")
        assert await asyncio.to_thread(found.wait, 1.0)

    try:
        linked(look, talk)
    finally:
        end.set()


def test_an_address_is_looked_up_for_nobody() -> None:
    """Whoever names thousands of them makes kvd do nothing for each that it would not do anyway."""

    async def talk(links: PeerLinks) -> None:
        name(links, "somebody", "127.0.0.1", "::1", "a-name")
        assert [host for _, host in links._names] == ["a-name"]

    def look(_host: str) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    linked(look, talk)


def test_links_that_are_made_while_they_are_closed_are_closed_too() -> None:
    def look(_host: str) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async def talk(links: PeerLinks) -> None:
        name(links, "kvd", *(f"host-{n}" for n in range(20)))
        closing = asyncio.create_task(cast("Any", links.close()))
        await asyncio.sleep(0)
        name(links, "kvd", "late")
        late = links.links[Endpoint("late", 7400)]
        await closing
        assert not late._tasks.running

    linked(look, talk)
