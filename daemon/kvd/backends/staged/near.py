"""A peer on this host: its mirrors are mapped here, so its bytes go from there to our KV memory in one copy.

The mirrors of a worker are in memfds. Who is allowed to map them, and how it is known that they are still the peer's,
is as with direct reads of host memory (docs/backends/direct.md). A device reads only memory that is registered with
its driver, which takes a while for many gigabytes: a thread does that, and until it is through the engine reads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvd.backends.cuda import driver
from kvd.backends.direct.calls import dumpable
from kvd.backends.direct.card import Card
from kvd.backends.direct.memfd import Cookie, MemfdView, backing
from kvd.backends.direct.process import Process, this_process
from kvd.backends.direct.source import Source
from kvd.backends.errors import BackendError, WorkerUnreachable
from kvd.backends.regions import RegisteredMemory, parse_device
from kvd.geometry.model import Region

NAME = "staged"
_AT_A_TIME = 256 << 20
"""Bytes that are registered in one call: some tens of milliseconds, for which closing waits."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """What peers on this host are told of a worker's mirrors, and what keeps it true."""

    card: Card
    cookie: Cookie

    def close(self) -> None:
        """Turn readers away: what they are reading now fails. Idempotent."""
        self.cookie.close()
        for memory in self.card.memory:
            os.close(memory.fd)


def share(mirrors: Sequence[Region]) -> Shared | None:
    """Let peers map these mirrors; None where they are in no memfds, or this is not a system on which that works."""
    found = [backing(mirror) for mirror in mirrors]
    memory = tuple(one for one in found if one is not None)
    try:
        if len(memory) < len(found):
            raise OSError(f"{len(found) - len(memory)} of {len(found)} mirrors are in no memfd")  # noqa: TRY301 - what was opened is closed below
        process, cookie = this_process(), Cookie()
    except OSError as error:
        _log.info("peers on this host cannot map the mirrors: %s", error)
        for one in memory:
            os.close(one.fd)
        return None
    card = Card(
        process=process,
        cookie=cookie.address,
        secret=cookie.secret,
        cookie_memory=cookie.memory,
        memory=memory,
        dumpable=dumpable(),
        allows=False,
    )
    return Shared(card, cookie)


class NearSource(Source):
    """A peer's mirrors, mapped; ``memory`` takes addresses of its KV memory to where their mirror stands here."""

    def __init__(self, here: Process, card: Card, spans: Sequence[Region], device: str) -> None:
        """Map them, and begin to register them with ``device``.

        Raises:
            WorkerUnreachable: as `Source`, another backend by now, or closed to us.
        """
        super().__init__(here, card)
        self._views: list[MemfdView] = []
        self._pins = Pins(device)
        with self._closed_on_error():
            self.memory = self._reach(spans)
            lengths = [span.length for span in spans]
            self._pins.start([(v.address, n) for v, n in zip(self._views, lengths, strict=True)])

    @property
    def ready(self) -> bool:
        """Whether the device can read all of it."""
        return self._pins.ready

    @property
    def mapped_bytes(self) -> int:
        """All of it."""
        return self.memory.nbytes

    def _reach(self, spans: Sequence[Region]) -> RegisteredMemory:
        pid = self._card.process.pid
        try:
            for span, memory in zip(spans, self._card.memory, strict=True):
                self._views.append(MemfdView(pid, memory, span.length))
            self._cookie = self._view_cookie()
        except (OSError, ValueError) as error:
            raise WorkerUnreachable(
                f"mirrors of process {pid} cannot be mapped: {error}", backend=NAME
            ) from None
        if doubt := self.doubt():
            raise WorkerUnreachable(doubt, backend=NAME)
        return RegisteredMemory(spans, [view.address for view in self._views])

    def _unmap(self) -> None:
        self._pins.close()
        while self._views:
            self._views.pop().close()


class Pins:
    """Memory that is registered with a device, part by part, on a thread of its own. On CPUs there is nothing to do."""

    def __init__(self, device: str) -> None:
        kind, self._ordinal = parse_device(device)
        self.ready = False
        self._needed = kind == "cuda"
        self._registered: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Begin with these (address, bytes)."""
        if not self._needed:
            self.ready = True
            return
        self._thread = threading.Thread(target=self._run, args=(stretches,), name="kvd-pins", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End that, and undo what was done. Waits for a call under way. Idempotent.

        Raises:
            CudaError: the driver refuses.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.ready = False
        while self._registered:
            driver.unpin(self._ordinal, self._registered[-1])
            self._registered.pop()

    def _run(self, stretches: Sequence[tuple[int, int]]) -> None:
        try:
            for address, length in stretches:
                for at in range(0, length, _AT_A_TIME):
                    if self._stop.is_set():
                        return
                    driver.pin(self._ordinal, address + at, min(_AT_A_TIME, length - at))
                    self._registered.append(address + at)
        except BackendError as error:
            _log.warning("mirrors of a peer on this host are read through the engine: %s", error)
        else:
            self.ready = True
