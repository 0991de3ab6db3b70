"""One NIXL agent: typed errors, registration that names the culprit, and a destruction that is checked."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.errors import BackendError, BackendUnavailable, RegistrationError
from kvd.backends.last_reference import check_destroyed
from kvd.backends.nixl.library import NAME, NixlLibrary, translate
from kvd.backends.regions import parse_device
from kvd.geometry.model import Region

MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
_HINTS = {
    "DRAM": "see `kvctl doctor` on memlock limits and peer memory",
    "VRAM": "UCX needs its CUDA transports: unset UCX_TLS and UCX_MODULES or let them have cuda; memory of torch's"
    " expandable segments cannot be shared (PYTORCH_CUDA_ALLOC_CONF)",
}

_log = logging.getLogger(__name__)


class Agent:
    """Owns NIXL's agent and is the only one to refer to it.

    ``name`` gets a random suffix: a worker that starts again under its old name must not be taken for its predecessor
    by agents that still hold a connection to it. ``ucx`` are UCX settings of this agent alone, without ``UCX_`` before
    their names; NIXL takes no comma in them, and a variable of the same name in the environment comes before them.
    """

    def __init__(
        self,
        library: NixlLibrary,
        name: str,
        *,
        progress: bool,
        ucx: Mapping[str, str] = MappingProxyType({}),
        device: int | None = None,
    ) -> None:
        """``device`` is the CUDA device of the memory that will be registered, where that is known before."""
        self.library = library
        self.name = f"{name}.{secrets.token_hex(4)}"
        self._device = device
        cuda_driver.enter(self._device)  # UCX looks for the transports of a device once, here
        self._gone: weakref.ref[Any] | None = None
        # NIXL's worker threads (num_threads) advance every post of 1024 descriptors and more by themselves: the bytes
        # of a parked lane would land with nobody calling into it.
        config = library.config(
            backends=[],
            num_threads=0,
            enable_prog_thread=progress,
        )
        failure = None
        self._nixl: Any = None
        try:
            self._nixl = library.agent(self.name, config)
            settings = ",".join(f"{key}={value}" for key, value in ucx.items())
            self._nixl.create_backend("UCX", {"engine_config": settings} if settings else {})
        except library.errors as error:
            failure = translate(error, f"start agent {self.name}").message
        if failure:
            self._nixl = None
            raise BackendUnavailable(
                failure, backend=NAME, hint="UCX_LOG_LEVEL=info says which transports it tried"
            )

    def call(self, doing: str, method: str, *arguments: Any) -> Any:
        """Call one of NIXL's methods.

        Raises:
            BackendError: what NIXL raised, translated; never chained to it, as its traceback would hold the agent.
        """
        cuda_driver.enter(self._device)
        failure: BackendError
        try:
            return getattr(self._nixl, method)(*arguments)
        except self.library.errors as error:
            failure = translate(error, doing)
        raise failure

    def pick(
        self, doing: str, operation: str, lists: list[Any], here: NDArray[np.int32], there: NDArray[np.int32]
    ) -> Any:
        """A transfer handle between elements of two prepared lists, the local one first in ``lists``.

        Not through `call`: the traceback of its error would hold the lists' handles, and with them the agent. This
        frame holds only the list they are in, which its owner empties.

        Raises:
            BackendError: as `call`.
        """
        cuda_driver.enter(self._device)
        failure: BackendError
        try:
            return self._nixl.make_prepped_xfer(operation, lists[0], here, lists[1], there)
        except self.library.errors as error:
            failure = translate(error, doing)
        raise failure

    def register(self, regions: Sequence[Region]) -> None:
        """Register ``regions``, of kinds in `MEMORY`, all of one kind at once.

        Raises:
            RegistrationError: a region NIXL refused.
            BackendError: memory of several CUDA devices.
        """
        self._device = cuda_driver.ordinal(regions)
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for region in regions:
            kind, ordinal = parse_device(region.device)
            rows.setdefault(MEMORY[kind], []).append((region.address, region.length, ordinal))
        for memory, members in rows.items():
            try:
                self.call(
                    f"register {len(members)} regions",
                    "register_memory",
                    np.array(members, np.uint64),
                    memory,
                )
            except BackendError as refused:
                raise self._culprit(memory, members, refused) from None

    def release(self, handles: list[Any]) -> None:
        """Release NIXL's transfer handles and forget them, finished or not. Does not stop bytes on their way."""
        cuda_driver.enter(self._device)
        while handles:
            try:
                handles.pop().release()
            except self.library.errors as error:
                # Destroying the agent frees it all the same, and that is what the lane does next.
                _log.warning("NIXL did not release a transfer of %s: %s", self.name, error)

    def destroy(self, *, settle: bool = False) -> None:
        """Destroy NIXL's agent. Call again to look again.

        Copies that UCX has queued on a GPU outlive its agent: ``settle`` waits for them, and for all else that this
        process has queued there.

        Raises:
            BackendError: something still refers to it, so it lives and its transfers may still write; or the device
                could not be waited for.
        """
        cuda_driver.enter(self._device)
        if self._gone is None:
            nixl, self._nixl = self._nixl, None
            # The wrapper may be held by a frame of somebody's traceback; what does the work is the object inside.
            self._gone = weakref.ref(nixl.agent)
            del nixl.agent
        hint = "keep no NIXL object outside kvd.backends.nixl.backend"
        check_destroyed(self._gone, f"agent {self.name}", backend=NAME, hint=hint)
        if settle:
            cuda_driver.settle(self._device)

    def _culprit(
        self, memory: str, members: Sequence[tuple[int, int, int]], refused: BackendError
    ) -> BackendError:
        """Register one by one what was refused together, to name the region that NIXL does not take."""
        for address, length, ordinal in members:
            row = np.array([(address, length, ordinal)], np.uint64)
            try:
                self.call("register", "register_memory", row, memory)
            except BackendError as alone:
                return RegistrationError(
                    f"{memory} region at {address:#x}, {length} bytes, device {ordinal}: {alone.message}",
                    backend=NAME,
                    hint=_HINTS.get(memory, _HINTS["DRAM"]),
                )
        return RegistrationError(refused.message, backend=NAME)
