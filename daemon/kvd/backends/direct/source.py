"""A peer as any direct lane sees it: the process that it is, and whether that and its backend are what they were."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from kvd.backends.contract import Holding
from kvd.backends.direct.calls import read_bytes
from kvd.backends.direct.card import Card
from kvd.backends.direct.memfd import MemfdView
from kvd.backends.direct.process import NAME, Process, ended, hold, on_this_host
from kvd.backends.errors import WorkerUnreachable
from kvd.backends.regions import RegisteredMemory

OTHERWISE = "set backend auto or a transfer engine on both sides"
"""The hint where this host or its devices cannot read the peer at all."""


class Source(ABC):
    """A peer's memory. ``memory`` is what it registered, and where that stands here; who derives from this finds it.

    What is mapped stays as it was when its owner ends, until it is unmapped here.
    """

    memory: RegisteredMemory

    def __init__(self, here: Process, card: Card) -> None:
        """Find the peer's process.

        Raises:
            WorkerUnreachable: elsewhere, gone, or another process by now; with the cure.
        """
        on_this_host(here, card.process)
        self._here, self._card = here, card
        self._cookie: MemfdView | None = None
        self._pidfd = hold(card.process)

    @property
    def gone(self) -> bool:
        """Whether the peer's process has ended; of a closed source nobody looks any more."""
        return self._pidfd >= 0 and ended(self._pidfd)

    @property
    @abstractmethod
    def mapped_bytes(self) -> int:
        """How much of the peer's memory is mapped into this process."""

    def holding(self, name: str) -> Holding:
        """What a lane that knows the peer by that name holds of it."""
        return Holding(name, self.memory.regions, self.memory.nbytes, self.mapped_bytes, self.gone)

    def doubt(self) -> str:
        """Why what was read until now may not be the peer's, or nothing.

        Ask after reading: a process that is there now was there before, under its number. Mapped memory stays as it was
        when its owner ended, so there only the cookie counts: a backend wipes it before its memory is used otherwise.
        """
        pid = self._card.process.pid
        try:
            found = self._read_cookie()
        except OSError as error:
            if self.gone:
                return f"process {pid} of the peer is gone"
            return f"the backend in process {pid} of the peer is gone: its cookie cannot be read ({error})"
        if found != self._card.secret:
            return f"the backend in process {pid} of the peer was closed, or another stands in its place"
        if self._cookie is None and self.gone:
            return f"process {pid} of the peer is gone"
        return ""

    def check(self) -> None:
        """Refuse to read what is not the peer's any more.

        Raises:
            WorkerUnreachable: its process or its backend is gone.
        """
        if why := self.doubt() or ("the peer's process is gone" if self.gone else ""):
            raise WorkerUnreachable(why, backend=NAME)

    def close(self) -> None:
        """Unmap and forget. Nothing may read any more. Idempotent.

        Raises:
            CudaError: the driver refuses.
        """
        self._unmap()
        if self._cookie is not None:
            self._cookie.close()
            self._cookie = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @abstractmethod
    def _unmap(self) -> None:
        """Unmap the memory, as far as it is mapped."""

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """To map or find the memory in, and have the cookie read once."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _view_cookie(self) -> MemfdView:
        """The peer's cookie, mapped. Raises OSError where it cannot be."""
        card = self._card
        return MemfdView(card.process.pid, card.cookie_memory, len(card.secret))

    def _read_cookie(self) -> bytes:
        if self._cookie is None:
            return read_bytes(self._card.process.pid, self._card.cookie, len(self._card.secret))
        # It is mapped, and sealed against shrinking.
        return ctypes.string_at(self._cookie.address, len(self._card.secret))
