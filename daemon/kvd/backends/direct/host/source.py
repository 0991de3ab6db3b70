"""A peer as a direct lane sees it: the process that it is, its memory, and whether both are still what they were."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import msgspec

from kvd.backends.direct.cuda.memory import CudaCard
from kvd.backends.direct.host.calls import read_bytes
from kvd.backends.direct.host.memory import Backing, MemfdView
from kvd.backends.direct.permission import refusal, rules, unknown
from kvd.backends.direct.process import NAME, Process, ended, hold, on_this_host
from kvd.backends.envelope import Envelope, unpack
from kvd.backends.errors import PeerMetadataError, WorkerUnreachable
from kvd.backends.regions import RegisteredMemory, joined
from kvd.geometry.model import Region

VERSION = "2"
"""Of the card that backends hand out. 2: memory may be a device's."""

_log = logging.getLogger(__name__)


class Card(msgspec.Struct, frozen=True):
    """What a backend tells its readers, beside its regions.

    ``secret`` stands at ``cookie`` in its memory and at the start of the memfd ``cookie_memory``. ``memory`` has the
    memfd of each joined region, or is empty where one has none. ``cuda`` is there where the memory is a device's.
    ``dumpable`` and ``allows``: as in `kvd.backends.direct.permission.refusal`.
    """

    process: Process
    cookie: int
    secret: bytes
    cookie_memory: Backing
    memory: tuple[Backing, ...]
    dumpable: bool
    allows: bool
    cuda: CudaCard | None = None


def read_card(metadata: bytes) -> tuple[Envelope, Card]:
    """A peer's envelope and the card in it.

    Raises:
        PeerMetadataError: not of this backend, or of another version of it, or no card.
    """
    envelope = unpack(metadata, backend=NAME, version=VERSION)
    try:
        card = msgspec.json.decode(envelope.blob, type=Card)
    except msgspec.DecodeError as error:
        raise PeerMetadataError(f"the peer's card cannot be read: {error}", backend=NAME) from None
    if card.memory and len(card.memory) != len(joined(envelope.regions)):
        raise PeerMetadataError(
            f"the peer's card has {len(card.memory)} memfds for {len(joined(envelope.regions))} regions",
            backend=NAME,
        )
    return envelope, card


class Source:
    """A peer's memory, mapped where it stands in memfds, else read in its process.

    ``pid`` is the process to read from: our own where the memory is mapped, since the same call copies a thousand
    scattered rows at once. ``memory`` is the peer's registered memory.
    """

    def __init__(self, here: Process, card: Card, regions: Sequence[Region]) -> None:
        """Find the peer and look whether it may be read.

        Raises:
            WorkerUnreachable: elsewhere, gone, another process or backend by now, or closed to us; with the cure.
        """
        on_this_host(here, card.process)
        if card.cuda is not None:
            raise WorkerUnreachable(
                "the peer's memory is on a GPU and this worker's on its CPU",
                backend=NAME,
                hint="set backend auto or a transfer engine on both sides",
            )
        self._card = card
        self._windows: list[MemfdView] = []
        self._cookie_window: MemfdView | None = None
        self._pidfd = hold(card.process)
        try:
            self.mapped = bool(card.memory) and self._map(joined(regions))
            self.pid = here.pid if self.mapped else card.process.pid
            places = [w.address for w in self._windows] if self.mapped else ()
            self.memory = RegisteredMemory(joined(regions), places)
            self._prove(here)
        except BaseException:
            self.close()
            raise

    @property
    def gone(self) -> bool:
        """Whether the peer's process has ended."""
        return ended(self._pidfd)

    def doubt(self) -> str:
        """Why what was read until now may not be the peer's, or nothing.

        Ask after reading: a process that is there now was there before, under its number. Mapped memory stays as it was
        when its owner ended, so there only the cookie counts: a backend wipes it before its memory is used otherwise.
        """
        pid = self._card.process.pid
        try:
            found = self._cookie()
        except OSError as error:
            if self.gone:
                return f"process {pid} of the peer is gone"
            return f"the backend in process {pid} of the peer is gone: its cookie cannot be read ({error})"
        if found != self._card.secret:
            return f"the backend in process {pid} of the peer was closed, or another stands in its place"
        if not self.mapped and self.gone:
            return f"process {pid} of the peer is gone"
        return ""

    def close(self) -> None:
        """Unmap and forget. Nothing may read any more. Idempotent."""
        while self._windows:
            self._windows.pop().close()
        if self._cookie_window is not None:
            self._cookie_window.close()
            self._cookie_window = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _map(self, regions: Sequence[Region]) -> bool:
        """Map all memory; False where it has to be read in the peer's process, which may be allowed or not."""
        pid = self._card.process.pid
        try:
            for region, memory in zip(regions, self._card.memory, strict=True):
                self._windows.append(MemfdView(pid, memory, region.length))
            self._cookie_window = MemfdView(pid, self._card.cookie_memory, len(self._card.secret))
        except OSError as error:
            _log.info("memory of process %d is not mapped but read in place: %s", pid, error)
            while self._windows:
                self._windows.pop().close()
            return False
        return True

    def _cookie(self) -> bytes:
        address = self._cookie_window.address if self._cookie_window else self._card.cookie
        return read_bytes(self.pid, address, len(self._card.secret))

    def _prove(self, here: Process) -> None:
        there, card = self._card.process, self._card
        try:
            self._cookie()
        except PermissionError:
            why = refusal(here, there, rules(), dumpable=card.dumpable, allows=card.allows) or unknown()
            raise WorkerUnreachable(
                f"memory of process {there.pid} may not be read: {why.why}", backend=NAME, hint=why.cure
            ) from None
        except OSError:
            pass  # what follows says it better
        doubt = self.doubt()
        if doubt:
            raise WorkerUnreachable(doubt, backend=NAME)
