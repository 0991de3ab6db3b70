"""The staged backend: KV memory that a transfer engine cannot register goes through host memory that it can.

See docs/backends/staged.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvd.backends import registry as choose
from kvd.backends.contract import Backend, Traits
from kvd.backends.errors import BackendError, RegistrationError
from kvd.backends.lanes import Holdings
from kvd.backends.regions import RegisteredMemory, checked, joined, only_device
from kvd.backends.staged.lane import Mirrored, StagedLane, write_metadata
from kvd.backends.staged.memory import NAME, Carrier, Mirrors
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

MOST_CTAS = 4096
_NO_ENGINES = (NAME, "auto", "direct")
_LOOK_S = 50e-6


@dataclass(frozen=True, slots=True)
class Settings:
    """What `open_backend` takes as options.

    ``engine`` moves bytes between the mirrors of two workers, with its own ``engine_options``. ``ctas`` is how many
    thread blocks a copy between a GPU and its mirror takes at most; 16 fill PCIe.
    """

    engine: str = "nixl"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    ctas: int = 16

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Settings from a mapping.

        Raises:
            BackendError: an option that does not exist, or a value that it cannot have.
        """
        known = ", ".join(cls.__dataclass_fields__)
        if unknown := sorted(set(options) - set(cls.__dataclass_fields__)):
            raise BackendError(
                f"unknown option {', '.join(unknown)} for staged; known are {known}", backend=NAME
            )
        values = {name: options.get(name, getattr(cls(), name)) for name in cls.__dataclass_fields__}
        engine, given, ctas = values["engine"], values["engine_options"], values["ctas"]
        if not isinstance(engine, str) or engine in _NO_ENGINES:
            raise BackendError(f"option engine is {engine!r}, which is no transfer engine", backend=NAME)
        if not isinstance(given, Mapping):
            raise BackendError(f"option engine_options is {given!r}; it is an object", backend=NAME)
        if not (type(ctas) is int and 0 < ctas <= MOST_CTAS):
            raise BackendError(f"option ctas is {ctas!r}; it is 1 to {MOST_CTAS}", backend=NAME)
        return cls(engine, given, ctas)


def open_backend(name: str, *, options: Mapping[str, Any]) -> StagedBackend:
    """A worker's backend over mirrors of its memory; ``options`` as in `Settings`.

    Raises:
        BackendUnavailable: the engine is not installed here.
        BackendError: an unknown option, also of the engine.
    """
    settings = Settings.of(options)
    return StagedBackend(name, settings, choose.open_backend(settings.engine, name, settings.engine_options))


class StagedBackend:
    """A worker's memory, mirrored in host memory; peers read the mirror, and see there what `stage` copied."""

    def __init__(self, name: str, settings: Settings, inner: Backend) -> None:
        self.name = name
        self._settings = settings
        self._inner = inner
        self._spans: tuple[Region, ...] = ()
        self._memory = RegisteredMemory(())
        self._mirrors: Mirrors | None = None
        self._out: Carrier | None = None
        self._out_lock = threading.Lock()
        self._holdings = Holdings(name, NAME)

    @property
    def traits(self) -> Traits:
        """The engine's, but that addresses are all that is taken, and nobody writes here."""
        return replace(self._inner.traits, strided_lists=False, notifications=False, lands=False)

    def register(self, regions: Sequence[Region]) -> None:
        """Make mirrors of this memory and register those with the engine. Once, before `metadata` and `lane`.

        Raises:
            RegistrationError: registered before, nothing given, a region that is empty, memory of several devices, no
                memory for the mirrors, or what the engine says.
        """
        self._holdings.registering()
        device = only_device(regions, backend=NAME)
        spans = tuple(joined(regions))
        mirrors = Mirrors(spans)
        try:
            self._out = mirrors.carrier(self._settings.ctas)
            at = zip(mirrors.addresses, spans, strict=True)
            self._inner.register([Region(address, span.length) for address, span in at])
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
        self._holdings.registered()
        self._memory = RegisteredMemory(spans, mirrors.addresses)

    def stage(self, rows: Descriptors) -> None:
        """Copy memory to where peers read it, and return when it is there.

        Both addresses of a row are of registered memory, and the same. May be called on any thread.

        Raises:
            TransferRefused: malformed columns, or memory that is not registered.
            BackendError: the device would not copy it.
        """
        self._registered()
        found = checked(
            rows, self._memory, self._memory, backend=NAME
        )  # remote addresses are of the mirror now
        with self._out_lock:
            if self._out is None or not len(found):
                return
            try:
                flight = self._out.begin(Descriptors(found.remote, found.local, found.length))
                while not flight.done():
                    time.sleep(_LOOK_S)
            except (RuntimeError, OSError) as error:
                raise BackendError(f"the copy to the mirror: {error}", backend=NAME) from error

    def metadata(self) -> bytes:
        """What a peer's `StagedLane.add` needs.

        Raises:
            RegistrationError: nothing is registered yet.
        """
        mirrors = self._registered()
        told = Mirrored(self._settings.engine, mirrors.addresses, self._inner.metadata())
        return write_metadata(self.name, self._spans, told)

    def lane(self, name: str) -> StagedLane:
        """A fresh lane.

        Raises:
            RegistrationError: nothing is registered yet.
            BackendError: as the engine.
        """
        mirrors = self._registered()
        engine, inner = self._settings.engine, self._inner.lane(name)
        carrier = mirrors.carrier(self._settings.ctas)
        return self._holdings.keep(
            StagedLane(name, engine, inner, self._memory, carrier, self._holdings.drop)
        )

    def close(self) -> None:
        """Close all lanes and the engine's backend, then give the mirrors back. Idempotent.

        Raises:
            BackendError: as the engine's backend.
        """
        self._holdings.close()
        self._inner.close()
        with self._out_lock:
            self._out = None
        if self._mirrors is not None:
            self._mirrors.close()

    def _registered(self) -> Mirrors:
        self._holdings.opened()
        if self._mirrors is None:
            raise RegistrationError("register memory first", backend=NAME)
        return self._mirrors
