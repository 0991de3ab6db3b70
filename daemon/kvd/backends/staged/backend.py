"""The staged backend: KV memory that a transfer engine cannot register goes through host memory that it can.

See docs/backends/staged.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvd.backends import registry
from kvd.backends.contract import Backend, Traits
from kvd.backends.direct.cuda.copies import LOOK_S
from kvd.backends.errors import BackendError, RegistrationError
from kvd.backends.lanes import EngineBackend
from kvd.backends.options import EngineName, Nested, ThreadBlocks, YesOrNo, read_options
from kvd.backends.regions import RegisteredMemory, checked, joined, only_device
from kvd.backends.staged.lane import LaneContext, Mirrored, StagedLane, write_metadata
from kvd.backends.staged.memory import NAME, Carrier, Mirrors
from kvd.backends.staged.near import Shared, share
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors


class StagedOptions(msgspec.Struct, frozen=True):
    """What `open_backend` takes as options.

    ``engine`` moves bytes between the mirrors of two workers, with its own ``engine_options``. ``ctas`` is how many
    thread blocks a copy between a GPU and its mirror takes at most; 16 fill PCIe. With ``memfd`` peers on this host map
    the mirrors, and the engine has nothing to do between them.
    """

    engine: EngineName = "nixl"
    engine_options: Nested = {}
    ctas: ThreadBlocks = 16
    memfd: YesOrNo = True


def open_backend(name: str, *, options: Mapping[str, Any]) -> StagedBackend:
    """A worker's backend over mirrors of its memory; ``options`` as in `StagedOptions`.

    Raises:
        BackendUnavailable: the engine is not installed here.
        BackendError: an unknown option, also of the engine.
    """
    found = read_options(StagedOptions, options, backend=NAME)
    registry.check_engine(found.engine, NAME)
    return StagedBackend(name, found, registry.open_backend(found.engine, name, found.engine_options))


class StagedBackend(EngineBackend[StagedLane]):
    """A worker's memory, mirrored in host memory; peers read the mirror, and see there what `stage` copied."""

    def __init__(self, name: str, options: StagedOptions, inner: Backend) -> None:
        super().__init__(name, NAME)
        self._options = options
        self._inner = inner
        self._spans: tuple[Region, ...] = ()
        self._memory = RegisteredMemory(())
        self._mirrors = Mirrors(())
        self._out: Carrier | None = None
        self._out_lock = threading.Lock()
        self._shared: Shared | None = None

    @property
    def traits(self) -> Traits:
        """The engine's, but that addresses are all that is taken, and nobody writes here."""
        return replace(self._inner.traits, strided_lists=False, lands=False)

    def _register(self, regions: Sequence[Region]) -> None:
        """Make mirrors of this memory and register those with the engine."""
        device = only_device(regions, backend=NAME)
        spans = tuple(joined(regions))
        mirrors = Mirrors(spans, mapped=self._options.memfd)
        try:
            self._out = mirrors.carrier(self._options.ctas)
            at = zip(mirrors.addresses, spans, strict=True)
            at_host = [Region(address, span.length) for address, span in at]
            self._inner.register(at_host)
        except Exception as error:
            mirrors.close()
            if isinstance(error, BackendError):
                raise
            raise RegistrationError(
                f"memory of {device} cannot be copied to the host: {type(error).__name__}: {error}",
                backend=NAME,
                hint="it needs torch with CUDA, and Triton with a C compiler",
            ) from error
        self._spans, self._mirrors = spans, mirrors
        self._memory = RegisteredMemory(spans, mirrors.addresses)
        if self._options.memfd:
            self._shared = share(at_host)

    def stage(self, rows: Descriptors) -> None:
        """Copy memory to where peers read it, and return when it is there.

        Both addresses of a row are of registered memory, and the same. May be called on any thread.

        Raises:
            TransferRefused: malformed columns, or memory that is not registered.
            BackendError: the device would not copy it.
        """
        self._ready()
        # Remote addresses are of the mirror from here on.
        found = checked(rows, self._memory, self._memory, backend=NAME)
        with self._out_lock:
            if self._out is None or not len(found):
                return
            try:
                flight = self._out(Descriptors(found.remote, found.local, found.length))
                while not flight.done():
                    time.sleep(LOOK_S)
            except (RuntimeError, OSError) as error:
                raise BackendError(f"the copy to the mirror: {error}", backend=NAME) from error

    def _describe(self) -> bytes:
        card = self._shared.card if self._shared else None
        told = Mirrored(self._options.engine, self._mirrors.addresses, self._inner.metadata(), card)
        return write_metadata(self.name, self._spans, told)

    def _lane(self, name: str) -> StagedLane:
        inner, carrier = self._inner.lane(name), self._mirrors.carrier(self._options.ctas)
        here = LaneContext(self._options.engine, self._memory, self._spans[0].device, self._shared)
        return StagedLane(name, here, inner, carrier, self._drop)

    def _end(self) -> None:
        self._inner.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        with self._out_lock:
            self._out = None
        self._mirrors.close()
