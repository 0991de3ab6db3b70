"""A peer with device memory as a direct lane sees it: the process that it is, and its memory mapped on our device."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvd.backends.cuda.driver import CudaError
from kvd.backends.cuda.ipc import Driver
from kvd.backends.direct.cuda.memory import (
    CudaCard,
    Mappings,
    SharedStretch,
    fetch_descriptor,
    ipc_namespace,
    stretches,
)
from kvd.backends.direct.host.calls import read_bytes
from kvd.backends.direct.host.memory import MemfdView
from kvd.backends.direct.host.source import Card
from kvd.backends.direct.permission import Rules, refusal, rules, unknown
from kvd.backends.direct.process import NAME, Process, ended, hold, on_this_host
from kvd.backends.errors import WorkerUnreachable
from kvd.backends.regions import RegisteredMemory
from kvd.geometry.model import Region

_AUTO = "set backend auto or a transfer engine on both sides"


class CudaSource:
    """A peer's device memory, mapped. ``memory`` is what it registered, and where that stands here.

    What is mapped stays as it was when its owner ends, until it is unmapped here.
    """

    def __init__(
        self, here: Process, card: Card, regions: Sequence[Region], device: Driver, mappings: Mappings
    ) -> None:
        """Find the peer and map its memory.

        Raises:
            WorkerUnreachable: elsewhere, gone, another process or backend by now, or memory that our device cannot
                reach; with reason and cure.
        """
        on_this_host(here, card.process)
        theirs = card.cuda
        if theirs is None:
            raise WorkerUnreachable(
                "the peer's memory is on its CPU and this worker's on a GPU", backend=NAME, hint=_AUTO
            )
        self._card, self._here, self._mappings = card, here, mappings
        self._taken: list[SharedStretch] = []
        self._cookie: MemfdView | None = None
        self._pidfd = hold(card.process)
        try:
            self._cookie = self._prove()
            _reachable(here, card.process, theirs, device)
            places = self._map(theirs)
            self.memory = RegisteredMemory(*stretches(regions, theirs.memory, places))
        except BaseException:
            self.close()
            raise

    @property
    def gone(self) -> bool:
        """Whether the peer's process has ended."""
        return ended(self._pidfd)

    def doubt(self) -> str:
        """Why what was read may not be the peer's, or nothing: a backend that closes wipes its cookie first."""
        window = self._cookie
        if (
            window is None
            or read_bytes(self._here.pid, window.address, len(self._card.secret)) != self._card.secret
        ):
            return f"the backend in process {self._card.process.pid} of the peer was closed"
        return ""

    def close(self) -> None:
        """Unmap and forget. No kernel may read there any more. Idempotent.

        Raises:
            CudaError: the driver refuses.
        """
        while self._taken:
            self._mappings.give_back(self._owner, self._taken.pop())
        if self._cookie is not None:
            self._cookie.close()
            self._cookie = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def _owner(self) -> str:
        process = self._card.process
        return f"{process.pid}.{process.started}"

    def _prove(self) -> MemfdView:
        card, there = self._card, self._card.process
        try:
            window = MemfdView(there.pid, card.cookie_memory, len(card.secret))
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
        if read_bytes(self._here.pid, window.address, len(card.secret)) != card.secret:
            window.close()
            raise WorkerUnreachable(
                f"the backend in process {there.pid} of the peer was closed, or another stands in its place",
                backend=NAME,
            )
        return window

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
                    hint=_AUTO,
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
            hint=_AUTO,
        )
    ordinal = device.others().get(theirs.device)
    # One that is not visible here may be reachable all the same; mapping it will tell.
    if ordinal is not None and not device.reaches(ordinal):
        raise WorkerUnreachable(
            f"GPU {device.uuid} of this worker has no access to the memory of GPU {theirs.device} of the peer",
            backend=NAME,
            hint=f"see `nvidia-smi topo -p2p r`; {_AUTO}",
        )
