"""A peer with device memory as a direct lane sees it: the process that it is, and its memory mapped on our device."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.backends.cuda.driver import CudaError
from kvd.backends.cuda.ipc import Driver
from kvd.backends.direct.card import Card, CudaCard, SharedStretch
from kvd.backends.direct.cuda.memory import Mappings, fetch_descriptor, ipc_namespace, stretches
from kvd.backends.direct.permission import Rules, refusal, rules, unknown
from kvd.backends.direct.process import NAME, Process
from kvd.backends.direct.source import OTHERWISE, Source
from kvd.backends.errors import WorkerUnreachable
from kvd.backends.regions import RegisteredMemory
from kvd.geometry.model import Region


class CudaSource(Source):
    """A peer's device memory, mapped."""

    def __init__(
        self, here: Process, card: Card, regions: Sequence[Region], device: Driver, mappings: Mappings
    ) -> None:
        """Map the peer's memory.

        Raises:
            WorkerUnreachable: as `Source`, another backend by now, closed to us, or out of our device's reach.
        """
        super().__init__(here, card)
        self._regions, self._device, self._mappings = regions, device, mappings
        self._taken: list[SharedStretch] = []
        with self._closed_on_error():
            self.memory = self._reach()

    @property
    def mapped_bytes(self) -> int:
        """Of the allocations that its memory lies in, as the driver maps no less."""
        return sum(shared.length for shared in list(self._taken))

    def _reach(self) -> RegisteredMemory:
        theirs = self._card.cuda
        if theirs is None:
            raise WorkerUnreachable(
                "the peer's memory is on its CPU and this worker's on a GPU", backend=NAME, hint=OTHERWISE
            )
        self._prove()
        _reachable(self._here, self._card.process, theirs, self._device)
        places = self._map(theirs)
        return RegisteredMemory(*stretches(self._regions, theirs.memory, places))

    def _unmap(self) -> None:
        while self._taken:
            self._mappings.give_back(self._owner, self._taken.pop())

    @property
    def _owner(self) -> str:
        process = self._card.process
        return f"{process.pid}.{process.started}"

    def _prove(self) -> None:
        card, there = self._card, self._card.process
        try:
            self._cookie = self._view_cookie()
        except PermissionError:
            # What Yama restricts does not concern a mapping.
            mine = Rules(0, rules().capable)
            why = refusal(self._here, there, mine, dumpable=card.dumpable, allows=card.allows) or unknown()
            raise WorkerUnreachable(
                f"process {there.pid} of the peer is closed to this one: {why.why}",
                backend=NAME,
                hint=why.cure,
            ) from None
        except OSError as error:
            raise WorkerUnreachable(
                f"the backend in process {there.pid} of the peer is gone: {error}", backend=NAME
            ) from None
        if doubt := self.doubt():
            raise WorkerUnreachable(doubt, backend=NAME)

    def _map(self, theirs: CudaCard) -> list[int]:
        if self._card.process == self._here:
            return [shared.address for shared in theirs.memory]
        places = []
        for shared in theirs.memory:
            try:
                places.append(self._mappings.take(self._owner, shared, self._fetch))
            except PermissionError as error:
                raise WorkerUnreachable(
                    f"memory of process {self._card.process.pid} is shared by file descriptors, which may not be taken"
                    f" from it: {error}",
                    backend=NAME,
                    hint="set kernel.yama.ptrace_scope to 0, leave out expandable_segments:True, or set backend auto",
                ) from None
            except (CudaError, OSError) as error:
                raise WorkerUnreachable(
                    f"memory of process {self._card.process.pid} on GPU {theirs.device} cannot be mapped: {error}",
                    backend=NAME,
                    hint=OTHERWISE,
                ) from None
            self._taken.append(shared)
        return places

    def _fetch(self, fd: int) -> int:
        return fetch_descriptor(self._pidfd, fd)


def _reachable(here: Process, there: Process, theirs: CudaCard, device: Driver) -> None:
    """Refuse what is known not to work; the driver's own refusal of a handle says little.

    Raises:
        WorkerUnreachable: another IPC namespace, or a device that ours has no access to.
    """
    mine = ipc_namespace()
    if theirs.ipc_namespace != mine:
        raise WorkerUnreachable(
            f"the peer is in IPC namespace {theirs.ipc_namespace} and this worker in {mine}",
            backend=NAME,
            hint="start both with the host's IPC namespace (docker --ipc=host, Kubernetes hostIPC), or share one",
        )
    if theirs.device == device.uuid:
        return
    if there == here:
        raise WorkerUnreachable(
            f"the peer is this process, on GPU {theirs.device} and not {device.uuid}",
            backend=NAME,
            hint=OTHERWISE,
        )
    ordinal = device.others().get(theirs.device)
    # One that is not visible here may be reachable all the same; mapping it will tell.
    if ordinal is not None and not device.reaches(ordinal):
        raise WorkerUnreachable(
            f"GPU {device.uuid} of this worker has no access to the memory of GPU {theirs.device} of the peer",
            backend=NAME,
            hint=f"see `nvidia-smi topo -p2p r`; {OTHERWISE}",
        )
