"""The Mooncake backend: an engine that peers read from, and short-lived ones for lanes and windows.

Nothing but the end of an engine stops Mooncake's bytes, in either direction (docs/backends/mooncake.md). So each lane
has its own, one for each worker of the peer, and so has each window.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
from msgspec import structs

from kvd.backends.contract import Traits
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.envelope import Envelope, decoded, pack
from kvd.backends.errors import BackendUnavailable, ForeignWindow, RegistrationError
from kvd.backends.lanes import EngineBackend, EngineWindow
from kvd.backends.mooncake.engine import MooncakeEngine
from kvd.backends.mooncake.lane import MooncakeLane
from kvd.backends.mooncake.library import INSTALL, NAME, MooncakeLibrary, load
from kvd.backends.mooncake.mark import DeviceMarks, host_mark
from kvd.backends.mooncake.options import NVLINK, MooncakeOptions, mooncake_options, protocol_for
from kvd.backends.mooncake.target import EngineTarget, parse_target
from kvd.backends.regions import check_regions
from kvd.backends.started_threads import threads_started
from kvd.backends.window_owner import same_worker
from kvd.geometry.model import Region

_log = logging.getLogger(__name__)


def open_backend(name: str, *, options: Mapping[str, Any]) -> MooncakeBackend:
    """A worker's Mooncake backend; ``options`` as in `MooncakeOptions`.

    Raises:
        BackendUnavailable: Mooncake is not installed or does not load here.
        BackendError: an unknown option, or a value that one cannot have.
    """
    return MooncakeBackend(name, mooncake_options(options), load())


def check_window(card: bytes, announced: bytes) -> None:
    """Refuse a window of another worker's, over other memory, or on another host than the worker's own engine.

    Raises `ForeignWindow` and `PeerMetadataError`.
    """
    worker, window = same_worker(card, announced, backend=NAME, name_of=str)
    home = decoded(worker.blob, EngineTarget, backend=NAME)
    told = parse_target(window.blob, home.protocol)
    if _host(told) != _host(home):
        raise ForeignWindow(
            f"the window that was announced is at {told.session}, and the worker's engine at {home.session}",
            backend=NAME,
            hint="both are of one process, so they have one address: nothing is written",
        )


def _host(target: EngineTarget) -> str:
    return target.session.rpartition(":")[0]


class MooncakeBackend(EngineBackend[MooncakeLane]):
    """A worker's registered memory. Threads of Mooncake's own answer the peers that read from it.

    ``traits`` are settled once memory is registered: with CUDA IPC the reader copies by itself, and so would a writer,
    whom nothing done here could stop; so peers do not write here.
    """

    traits = Traits(lands=True)

    def __init__(self, name: str, options: MooncakeOptions, library: MooncakeLibrary) -> None:
        super().__init__(name, NAME)
        self._options = options
        self._library = library
        self._engine: MooncakeEngine | None = None
        self._marks: DeviceMarks | None = None

    def _register(self, regions: Sequence[Region]) -> None:
        check_regions(regions, backend=NAME, kinds=("cpu", "cuda"))
        if not self._library.cuda and (gpu := next((r for r in regions if r.device != "cpu"), None)):
            raise RegistrationError(
                f"{gpu} is GPU memory and this build of Mooncake ({self._library.version}) has no CUDA",
                backend=NAME,
                hint=INSTALL,
            )
        if self._options.protocol == "auto":
            self._options = structs.replace(
                self._options, protocol=protocol_for(regions, self._library, os.environ)
            )
        if (device := cuda_driver.ordinal(regions)) is not None:
            self._look_at(device)
        elif self._options.protocol == NVLINK:
            raise RegistrationError(
                f"option protocol is {NVLINK} and memory is on the host",
                backend=NAME,
                hint="choose another protocol, or leave the option out",
            )
        self._engine, self.serving = threads_started(lambda: self._engine_over(regions))

    def _look_at(self, device: int) -> None:
        """Settle what is different for memory of a GPU."""
        protocol = self._options.protocol
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

    def _describe(self) -> bytes:
        return self._target(self.name, cast("MooncakeEngine", self._engine))

    def _lane(self, name: str) -> MooncakeLane:
        """Its engines are made as workers are added."""
        return MooncakeLane(
            name,
            self._options,
            self.regions,
            version=self._library.version,
            make=lambda: self._engine_over(self.regions),
            closed=self._drop,
        )

    def window(self, name: str) -> MooncakeWindow:
        """A fresh window: an engine of its own over the same memory, for one peer to write to.

        Raises:
            RegistrationError: nothing is registered yet.
            BackendUnavailable: Mooncake does not start another engine, or peers do not write here.
        """
        self._ready()
        if not self.traits.lands:
            raise BackendUnavailable(
                "no window: with CUDA IPC the writer's process copies, and nothing done here would stop it",
                backend=NAME,
            )
        engine = self._engine_over(self.regions)
        metadata = self._target(f"{self.name}.{name}", engine)
        return self._keep(MooncakeWindow(name, metadata, engine, self._drop))

    def _end(self) -> None:
        if self._engine:
            self._engine.destroy()
        if self._marks:
            self._marks.close()

    def _engine_over(self, regions: Sequence[Region]) -> MooncakeEngine:
        mark = self._marks.take() if self._marks else host_mark()
        return MooncakeEngine(self._library, self._options, regions, mark)

    def _target(self, name: str, engine: MooncakeEngine) -> bytes:
        mark = engine.mark
        target = EngineTarget(engine.session, self._options.protocol, mark.value.hex(), mark.address)
        return pack(Envelope(NAME, self._library.version, name, self.regions, msgspec.json.encode(target)))


class MooncakeWindow(EngineWindow):
    """What one peer engine writes into. A thread of Mooncake's own lands the bytes."""

    def __init__(
        self, name: str, metadata: bytes, engine: MooncakeEngine, closed: Callable[[MooncakeWindow], None]
    ) -> None:
        super().__init__(name, metadata, NAME, closed)
        self._engine = engine

    def _stop(self) -> None:
        self._engine.destroy()
