"""Follows the list of trusted keys while kvd runs: who was let in comes in, who was revoked goes, within a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

from kvd.keys import KeyFileError
from kvd.service.daemon import Daemon
from kvd.service.errors import PeerAway
from kvd.service.peers.trust import Keys
from kvd.service.slices import paced
from kvd.wire.identity import HERE

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often the file's times are looked at: a fifth of the second within which a revoked host is to be gone."""


async def follow(daemon: Daemon, keys: Keys) -> None:
    """Until cancelled: put the list in force whenever its file changed. One that cannot be read changes nothing."""
    _warn_of_two_keys(keys)
    # A thread of its own: a file system that hangs holds this one, and no other of the daemon.
    with ThreadPoolExecutor(1, "kvd-keys") as reader:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if keys.stale:
                await _read_again(daemon, keys, reader)
            if await asyncio.get_running_loop().run_in_executor(reader, keys.look_at_pair) and keys.pair:
                log.warning("kvd will not be who it is once it is started again: %s", keys.pair)


async def _read_again(daemon: Daemon, keys: Keys, reader: ThreadPoolExecutor) -> None:
    try:
        trusted = await asyncio.get_running_loop().run_in_executor(reader, keys.read)
    except KeyFileError as error:
        if keys.error != error.message:
            keys.error = error.message
            daemon.counters["keys.unreadable"] += 1
            log.error(  # noqa: TRY400 (the message says it all)
                "the keys stay as they are: %s", error.message, extra={"code": error.code}
            )
        return
    if keys.half_written(trusted):
        return
    before, places = keys.authorised, keys.places
    if not keys.take(trusted):
        return
    _warn_of_two_keys(keys)
    revoked = before - keys.authorised
    for key in revoked:
        daemon.subscribers.forget_key(key)
        daemon.sockets.refusals.revoked(key, places.get(key, "no host"))
        daemon.events.emit("key.revoked", key.decode(), place=places.get(key, ""))
    for key in keys.authorised - before:
        daemon.sockets.refusals.trusted(key)
        daemon.events.emit("key.trusted", key.decode(), place=keys.places.get(key, ""))
    daemon.counters["keys.changes"] += 1
    daemon.sockets.end_peers(revoked)
    await daemon.links.keys_changed()
    await _link_again(daemon)


def _warn_of_two_keys(keys: Keys) -> None:
    if keys.twice:
        log.warning("the list of trusted keys: %s: both are let in, and the last one counts", keys.twice)


async def _link_again(daemon: Daemon) -> None:
    """Make links anew to hosts that have another key now, or are trusted for the first time.

    Engines of the first are in use, and nobody asks for them again; the others are to be linked, used or not.
    """
    used = {at for (at, _), peer in daemon.handshakes.peers.items() if at != HERE and peer.state != "gone"}
    async for endpoint in paced(used | daemon.links.kept):
        if daemon.links.trusts(endpoint):
            with contextlib.suppress(PeerAway):
                daemon.links.get(endpoint)
