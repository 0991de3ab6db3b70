"""A peer with host memory as a direct lane sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvd.backends.direct.card import Card
from kvd.backends.direct.memfd import MemfdView
from kvd.backends.direct.permission import refusal, rules, unknown
from kvd.backends.direct.process import NAME, Process
from kvd.backends.direct.source import OTHERWISE, Source
from kvd.backends.errors import WorkerUnreachable
from kvd.backends.regions import RegisteredMemory, joined
from kvd.geometry.model import Region

_log = logging.getLogger(__name__)


class HostSource(Source):
    """A peer's memory, mapped where it stands in memfds, else read in its process.

    ``pid`` is the process to read from: our own where the memory is mapped, since the same call copies a thousand
    scattered rows at once.
    """

    def __init__(self, here: Process, card: Card, regions: Sequence[Region]) -> None:
        """Look whether the peer may be read.

        Raises:
            WorkerUnreachable: as `Source`, another backend by now, or closed to us; with the cure.
        """
        super().__init__(here, card)
        self._regions = joined(regions)
        self._views: list[MemfdView] = []
        with self._closed_on_error():
            self.memory = self._reach()

    @property
    def mapped_bytes(self) -> int:
        """All of it, or nothing where it is read in its owner's process."""
        return self.memory.nbytes if self.mapped else 0

    def _reach(self) -> RegisteredMemory:
        if self._card.cuda is not None:
            raise WorkerUnreachable(
                "the peer's memory is on a GPU and this worker's on its CPU", backend=NAME, hint=OTHERWISE
            )
        self.mapped = bool(self._card.memory) and self._map()
        self.pid = self._here.pid if self.mapped else self._card.process.pid
        self._prove()
        return RegisteredMemory(self._regions, [view.address for view in self._views])

    def _unmap(self) -> None:
        while self._views:
            self._views.pop().close()

    def _map(self) -> bool:
        """Map all memory; False where it has to be read in the peer's process, which may be allowed or not."""
        pid = self._card.process.pid
        try:
            for region, memory in zip(self._regions, self._card.memory, strict=True):
                self._views.append(MemfdView(pid, memory, region.length))
            self._cookie = self._view_cookie()
        except OSError as error:
            _log.info("memory of process %d is not mapped but read in place: %s", pid, error)
            self._unmap()
            return False
        return True

    def _prove(self) -> None:
        there, card = self._card.process, self._card
        try:
            self._read_cookie()
        except PermissionError:
            why = refusal(self._here, there, rules(), dumpable=card.dumpable, allows=card.allows) or unknown()
            raise WorkerUnreachable(
                f"memory of process {there.pid} may not be read: {why.why}", backend=NAME, hint=why.cure
            ) from None
        except OSError:
            pass  # what follows says it better
        if doubt := self.doubt():
            raise WorkerUnreachable(doubt, backend=NAME)
