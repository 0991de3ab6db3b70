"""The auto backend: reads directly where both workers are on one host and allowed to, else through a transfer engine.

See docs/backends/direct.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvd.backends import registry
from kvd.backends.auto.lane import AutoLane, Backends
from kvd.backends.auto.metadata import NAME, Both, write_both
from kvd.backends.contract import Backend, Traits, serving_threads
from kvd.backends.direct import backend as direct
from kvd.backends.direct.process import NAME as DIRECT
from kvd.backends.errors import BackendUnavailable, RegistrationError
from kvd.backends.lanes import EngineBackend
from kvd.backends.options import EngineName, Nested, read_options
from kvd.geometry.model import Region

_log = logging.getLogger(__name__)


class AutoOptions(msgspec.Struct, frozen=True):
    """What `open_backend` takes as options.

    ``engine`` is the transfer engine for peers that cannot be read directly, with its own ``engine_options``;
    ``direct_options`` are those of `DirectOptions`.
    """

    engine: EngineName = "nixl"
    engine_options: Nested = {}
    direct_options: Nested = {}


def auto_options(given: Mapping[str, Any]) -> tuple[AutoOptions, direct.DirectOptions]:
    """The options, and those of direct reads in them.

    Raises:
        BackendError: an option that does not exist, or a value that it cannot have.
    """
    found = read_options(AutoOptions, given, backend=NAME)
    registry.check_engine(found.engine, NAME)
    return found, read_options(direct.DirectOptions, found.direct_options, backend=DIRECT)


def maps_memory(options: Mapping[str, Any]) -> bool:
    """Whether peers may map host memory of memfds. Raises as `auto_options`."""
    return auto_options(options)[1].memfd


def open_backend(name: str, *, options: Mapping[str, Any]) -> AutoBackend:
    """A backend over the direct one and that of a transfer engine; ``options`` as in `AutoOptions`.

    Where one of the two cannot be opened the log says why, and the other serves alone.

    Raises:
        BackendUnavailable: neither can be opened.
        BackendError: an unknown option, also of the backends behind it.
    """
    found, of_direct = auto_options(options)
    backends = Backends(found.engine)
    try:
        backends.direct = direct.DirectBackend(name, of_direct)
    except BackendUnavailable as error:
        backends.no_direct = error.message
    try:
        backends.engine = registry.open_backend(found.engine, name, found.engine_options)
    except BackendUnavailable as error:
        backends.no_engine = error.message
    for reason in filter(None, (backends.no_direct, backends.no_engine)):
        _log.warning("%s", reason)
    if backends.direct is None and backends.engine is None:
        raise BackendUnavailable(
            f"neither direct reads nor {found.engine} work here: {backends.no_direct}; {backends.no_engine}",
            backend=NAME,
        )
    return AutoBackend(name, backends)


class AutoBackend(EngineBackend[AutoLane]):
    """A worker's memory, registered with both backends. It is read only, as one of the two can do no more."""

    def __init__(self, name: str, backends: Backends) -> None:
        super().__init__(name, NAME)
        self._backends = backends

    @property
    def traits(self) -> Traits:
        """Those of both, as a lane may be of either; nobody writes here."""
        found = [
            backend.traits
            for backend in (self._backends.engine, self._backends.direct)
            if backend is not None
        ]
        first = found[0] if found else direct.HOST_TRAITS
        selection = any(traits.strided_lists for traits in found)
        return replace(first, synchronous=True, lands=False, strided_lists=selection)

    def _register(self, regions: Sequence[Region]) -> None:
        """With both. What only one of them refuses leaves the other to serve alone, and stands in the log."""
        backends = self._backends
        backends.direct, backends.no_direct = _registered(backends.direct, backends.no_direct, regions)
        backends.engine, backends.no_engine = _registered(backends.engine, backends.no_engine, regions)
        if backends.direct is None and backends.engine is None:
            raise RegistrationError(f"{backends.no_direct}; {backends.no_engine}", backend=NAME)
        self.serving = serving_threads(backends.engine) if backends.engine else frozenset()

    def _describe(self) -> bytes:
        backends = self._backends
        both = Both(
            engine=backends.engine_name,
            direct_metadata=backends.direct.metadata() if backends.direct else b"",
            engine_metadata=backends.engine.metadata() if backends.engine else b"",
            no_direct=backends.no_direct,
            no_engine=backends.no_engine,
        )
        return write_both(self.name, both)

    def _lane(self, name: str) -> AutoLane:
        """The engine's is made when it turns out to be needed."""
        return AutoLane(name, self._backends, self._drop)

    def _end(self) -> None:
        for backend in (self._backends.direct, self._backends.engine):
            if backend is not None:
                backend.close()


def _registered(
    backend: Backend | None, reason: str, regions: Sequence[Region]
) -> tuple[Backend | None, str]:
    """The backend with the memory registered, or why there is none."""
    if backend is None:
        return None, reason
    try:
        backend.register(regions)
    except RegistrationError as error:
        _log.warning("%s", error.message)
        # It refused the memory as a whole, but what it keeps open must not outlive it.
        backend.close()
        return None, error.message
    return backend, ""
