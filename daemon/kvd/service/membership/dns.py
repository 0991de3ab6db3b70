"""Members by DNS: all addresses of one name, such as a headless Service of Kubernetes, are kvds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvd.addresses import split_address
from kvd.service.config import DnsSettings
from kvd.service.membership.members import Taker
from kvd.service.membership.told import ToldHost, Untold, place_of
from kvd.service.sockets.resolver import Address

LookAgain = Callable[[str], Awaitable[Sequence[Address]]]
"""The addresses of a name, looked up now and on another thread. Raises `OSError`."""
IsOurs = Callable[[str, int], bool]
"""Whether this kvd itself listens at an address."""


async def follow(settings: DnsSettings, look: LookAgain, is_ours: IsOurs, taker: Taker) -> None:
    """Until cancelled: look the name up again and again, and tell of all its addresses."""
    host, port = split_address(settings.name)
    while True:
        try:
            found = await look(host)
        except OSError as error:
            taker.away(str(error))
        else:
            hosts = []
            for address in dict.fromkeys(address for _, address in found):
                try:
                    told = ToldHost(place_of(address, port), name=host)
                except Untold as untold:
                    taker.wrong(str(untold))
                    continue
                if not is_ours(address, port):
                    hosts.append(told)
            taker.take(hosts)
        await asyncio.sleep(settings.every_seconds)
