"""The direct backend: a worker reads the memory of another one on its host by itself, without any transfer engine.

On CPUs the system copies from process to process; on GPUs a kernel of our own copies out of the peer's mapped memory.
See docs/backends/direct.md for who may read whom, and for figures.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvd.backends.contract import Traits
from kvd.backends.direct.calls import allow_tracers, dumpable, read_bytes
from kvd.backends.direct.card import VERSION, Card
from kvd.backends.direct.cuda.device import CudaSide, open_device
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.backends.direct.host.lane import DirectLane
from kvd.backends.direct.memfd import Backing, Cookie, backing
from kvd.backends.direct.permission import refusal, rules
from kvd.backends.direct.process import NAME, this_process
from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import BackendUnavailable
from kvd.backends.lanes import EngineBackend
from kvd.backends.options import CopyThreads, ThreadBlocks, YesOrNo, read_options
from kvd.backends.regions import joined, only_device
from kvd.backends.split_lane import SplitLane, split
from kvd.geometry.model import Region

_log = logging.getLogger(__name__)


class DirectOptions(msgspec.Struct, frozen=True):
    """What `open_backend` takes as options.

    ``memfd``: let vLLM's KV memory on CPUs be memory that peers can map (kvd.vllm.memory.pool does it). Where it is
    not, and Yama restricts who may read a process, ``allow_readers`` tells Yama to admit any process to this one that
    all other rules admit. ``ctas`` is how many thread blocks a copy between GPUs takes at most, since they take their
    share of the device while they run; 0, the default, is what fills the link in as few as can be, which depends on the
    kernel. ``copy_threads`` is how many threads copy a large read of host memory (`kvd.backends.split_lane`).
    """

    memfd: YesOrNo = True
    allow_readers: YesOrNo = True
    ctas: ThreadBlocks = 0
    copy_threads: CopyThreads = 2


def open_backend(name: str, *, options: Mapping[str, Any]) -> DirectBackend:
    """A worker's direct backend; ``options`` as in `DirectOptions`.

    Raises:
        BackendUnavailable: this system has not what it takes.
        BackendError: an unknown option.
    """
    return DirectBackend(name, read_options(DirectOptions, options, backend=NAME))


def maps_memory(options: Mapping[str, Any]) -> bool:
    """Whether peers may map host memory of memfds. Raises as `open_backend`."""
    return read_options(DirectOptions, options, backend=NAME).memfd


HOST_TRAITS = Traits(synchronous=True)
CUDA_TRAITS = Traits(strided_lists=True, block_lists=True, least_piece=1 << 30)
"""1 GiB takes about 3 ms over NVLink. In two, four or eight pieces it was here as soon as in one, and each launch takes
some 0.3 ms of the worker's processor (docs/backends/direct.md)."""


class DirectBackend(EngineBackend[DirectLane | CudaLane | SplitLane]):
    """A worker's memory, which its peers read without its help; nothing here runs.

    ``traits`` are of the kind of memory that is registered, of host memory until then.
    """

    def __init__(self, name: str, options: DirectOptions) -> None:
        super().__init__(name, NAME)
        self.traits = HOST_TRAITS
        self._options = options
        self._memory: tuple[Backing, ...] = ()
        self._cuda: CudaSide | None = None
        self._allows = False
        try:
            self._process = this_process()
            self._cookie = _readable_cookie(self._process.pid)
        except OSError as error:
            raise BackendUnavailable(
                f"a process cannot read another's memory on this system: {error}",
                backend=NAME,
                hint="it needs Linux with /proc and memfd, and no seccomp filter on process_vm_readv",
            ) from None

    def _register(self, regions: Sequence[Region]) -> None:
        """Note the memory that peers may read.

        Where the rules of this host will keep peers from it, the log says so with the cure; this worker may still be
        able to read others.
        """
        device = only_device(regions, backend=NAME)
        if device != "cpu":
            self._cuda = open_device(device, regions, self._options.ctas)
            self.traits = CUDA_TRAITS
            return
        self._memory = _backings(regions)
        mine = rules()
        if not self._memory and mine.scope == 1 and self._options.allow_readers:
            self._allows = allow_tracers()
        why = refusal(self._process, self._process, mine, dumpable=dumpable(), allows=self._allows)
        if why is not None and not self._memory:
            _log.warning("peers cannot read the memory of %s: %s; %s", self.name, why.why, why.cure)

    def _describe(self) -> bytes:
        card = Card(
            process=self._process,
            cookie=self._cookie.address,
            secret=self._cookie.secret,
            cookie_memory=self._cookie.memory,
            memory=self._memory,
            dumpable=dumpable(),
            allows=self._allows,
            cuda=self._cuda.card if self._cuda else None,
        )
        return pack(Envelope(NAME, VERSION, self.name, self.regions, msgspec.json.encode(card)))

    def _lane(self, name: str) -> DirectLane | CudaLane | SplitLane:
        if self._cuda:
            return self._cuda.lane(name, self._process, self.regions, self._drop)
        return split(name, NAME, self._options.copy_threads, self._one_thread, self._drop)

    def _one_thread(self, name: str) -> DirectLane:
        return DirectLane(name, self._process, self.regions, self._drop)

    def _end(self) -> None:
        """Turn readers away: what they are reading now fails."""
        self._cookie.close()
        memory, self._memory = self._memory, ()
        for one in memory:
            os.close(one.fd)
        if self._cuda:
            self._cuda.close()
            self._cuda = None


def _backings(regions: Sequence[Region]) -> tuple[Backing, ...]:
    """The memfds of all joined regions, or nothing where one has none."""
    found = [backing(region) for region in joined(regions)]
    whole = tuple(memory for memory in found if memory is not None)
    if len(whole) == len(found):
        return whole
    for memory in whole:
        os.close(memory.fd)
    return ()


def _readable_cookie(pid: int) -> Cookie:
    """A cookie that the call which peers use can read; raises OSError where there is no such call or a filter on it."""
    cookie = Cookie()
    try:
        read_bytes(pid, cookie.address, len(cookie.secret))
    except OSError:
        cookie.close()
        raise
    return cookie
