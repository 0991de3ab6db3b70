"""The Mooncake backend: an engine that peers read from, and short-lived ones for lanes and windows.

Nothing but the end of an engine stops Mooncake's bytes, in either direction (docs/backends/mooncake.md). So each lane
has its own, one for each worker of the peer, and so has each window.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvd.backends.contract import Traits
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import BackendError, BackendUnavailable, RegistrationError, TransferRefused
from kvd.backends.mooncake.engine import Engine, registrable
from kvd.backends.mooncake.lane import MooncakeLane
from kvd.backends.mooncake.library import INSTALL, NAME, Library, load
from kvd.backends.mooncake.mark import DeviceMarks, host_mark
from kvd.backends.mooncake.settings import NVLINK, Settings, protocol_for
from kvd.backends.mooncake.target import Target, pack_target
from kvd.geometry.model import Region

_log = logging.getLogger(__name__)


def open_backend(name: str, *, options: Mapping[str, Any]) -> MooncakeBackend:
    """A worker's Mooncake backend; ``options`` as in `Settings`.

    Raises:
        BackendUnavailable: Mooncake is not installed or does not load here.
        BackendError: an unknown option, or a value that one cannot have.
    """
    return MooncakeBackend(name, Settings.of(options), load())


class MooncakeBackend:
    """A worker's registered memory. Threads of Mooncake's own answer the peers that read from it.

    ``traits`` are settled once memory is registered: with CUDA IPC the reader copies by itself, and so would a writer,
    whom nothing done here could stop; so peers do not write here.
    """

    traits = Traits(late_writes_stop_at="lane", lands=True)

    def __init__(self, name: str, settings: Settings, library: Library) -> None:
        self.name = name
        self._settings = settings
        self._library = library
        self._engine: Engine | None = None
        self._marks: DeviceMarks | None = None
        self._regions: tuple[Region, ...] = ()
        self._lanes: set[MooncakeLane] = set()
        self._windows: set[MooncakeWindow] = set()
        self._open = True

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory. Once, before `metadata`, `lane` and `window`.

        Raises:
            RegistrationError: registered before, nothing given, or Mooncake refused a region.
            BackendUnavailable: Mooncake's engine does not start.
        """
        self._opened()
        if self._engine:
            raise RegistrationError("memory of this backend is registered already", backend=NAME)
        if not regions:
            raise RegistrationError("no regions to register", backend=NAME)
        for region in regions:
            registrable(region, self._library)
        if self._settings.protocol == "auto":
            self._settings = replace(
                self._settings, protocol=protocol_for(regions, self._library, os.environ)
            )
        self._regions = tuple(regions)
        if (device := cuda_driver.ordinal(regions)) is not None:
            self._look_at(device)
        elif self._settings.protocol == NVLINK:
            raise RegistrationError(f"option protocol is {NVLINK} and memory is on the host", backend=NAME)
        self._engine = self._make()

    def _look_at(self, device: int) -> None:
        """Settle what is different for memory of a GPU."""
        protocol = self._settings.protocol
        _log.info("Mooncake moves the memory of cuda:%d by %s", device, protocol)
        if protocol == NVLINK and not self._library.nvlink:
            raise RegistrationError(
                f"option protocol is {NVLINK} and this build of Mooncake ({self._library.version}) has none",
                backend=NAME,
                hint=INSTALL,
            )
        if protocol == NVLINK:
            self._marks = DeviceMarks(device)
            self.traits = replace(self.traits, synchronous=True, lands=False)
        elif protocol == "tcp":
            _log.warning(
                "Mooncake copies the memory of cuda:%d over tcp, through the host: slow. Within a host set the option "
                "protocol to nvlink, between hosts to rdma",
                device,
            )

    def metadata(self) -> bytes:
        """What a peer's `MooncakeLane.add` needs, to read.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        return self._describe(self.name, self._registered())

    def lane(self, name: str) -> MooncakeLane:
        """A fresh lane; its engines are made as workers are added.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        self._registered()
        lane = MooncakeLane(
            name,
            self._settings,
            self._regions,
            version=self._library.version,
            make=self._make,
            closed=self._lanes.discard,
        )
        self._lanes.add(lane)
        return lane

    def window(self, name: str) -> MooncakeWindow:
        """A fresh window: an engine of its own over the same memory, for one peer to write to.

        Raises:
            RegistrationError: nothing is registered yet.
            BackendUnavailable: Mooncake does not start another engine, or peers do not write here.
        """
        self._registered()
        if not self.traits.lands:
            raise BackendUnavailable(
                "no window: with CUDA IPC the writer's process copies, and nothing done here would stop it",
                backend=NAME,
            )
        engine = self._make()
        window = MooncakeWindow(
            name, engine, self._describe(f"{self.name}.{name}", engine), self._windows.discard
        )
        self._windows.add(window)
        return window

    def close(self) -> None:
        """Destroy all lanes and windows, then the backend's engine. Idempotent.

        Raises:
            BackendError: an engine outlived its destruction (see `MooncakeLane.close`).
        """
        self._open = False
        for lane in list(self._lanes):
            lane.close()
        for window in list(self._windows):
            window.close()
        if self._engine:
            self._engine.destroy()
        if self._marks:
            self._marks.close()

    def _make(self) -> Engine:
        mark = self._marks.take() if self._marks else host_mark()
        return Engine(self._library, self._settings, self._regions, mark)

    def _describe(self, name: str, engine: Engine) -> bytes:
        target = Target(engine.session, self._settings.protocol, engine.mark.value, engine.mark.address)
        return pack(Envelope(NAME, self._library.version, name, self._regions, pack_target(target)))

    def _opened(self) -> None:
        if not self._open:
            raise BackendError(f"backend {self.name!r} is closed", backend=NAME)

    def _registered(self) -> Engine:
        self._opened()
        if self._engine is None:
            raise RegistrationError("register memory first", backend=NAME)
        return self._engine


class MooncakeWindow:
    """What one peer engine writes into. A thread of Mooncake's own lands the bytes."""

    def __init__(
        self, name: str, engine: Engine, metadata: bytes, closed: Callable[[MooncakeWindow], None]
    ) -> None:
        self.name = name
        self._engine = engine
        self._metadata = metadata
        self._open = True
        self._closed = closed

    def metadata(self) -> bytes:
        """What the writing peer's `MooncakeLane.add` needs; good until `close`.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()
        return self._metadata

    def progress(self) -> None:
        """Nothing to do while it is open: Mooncake's thread lands the bytes.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()

    def close(self) -> None:
        """End the window: when this returns nothing that the peer writes can land any more. Idempotent.

        Raises:
            BackendError: something outside this backend holds the engine, so it still lives and bytes may still land.
        """
        self._open = False
        self._engine.destroy()
        self._closed(self)

    def _opened(self) -> None:
        if not self._open:
            raise TransferRefused(f"window {self.name!r} is closed", backend=NAME)
