"""The NIXL backend: one agent that peers read from, and one short-lived agent a lane.

Nothing but the end of an agent stops NIXL's bytes (docs/backends/nixl.md), and an agent ends when nothing refers to it
any more. NIXL's handles, even released ones, and the frames of its exceptions do refer to it; so both stay inside
``kvd.backends.nixl.backend*``, and the end of an agent is checked.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvd.backends.contract import Traits
from kvd.backends.cuda import driver as cuda_driver
from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import BackendError, BackendUnavailable, RegistrationError
from kvd.backends.lanes import EngineBackend
from kvd.backends.nixl.agent import MEMORY, Agent
from kvd.backends.nixl.lane import NixlLane, Parked
from kvd.backends.nixl.library import NAME, NixlLibrary, load, software_only
from kvd.backends.nixl.window import SHIELD, NixlWindow, refusal
from kvd.backends.options import CopyThreads, read_options
from kvd.backends.regions import check_regions
from kvd.backends.split_lane import SplitLane, split
from kvd.backends.started_threads import threads_started
from kvd.backends.window_owner import before_last_dot, same_worker
from kvd.geometry.model import Region

_log = logging.getLogger(__name__)

PARKED_LIMIT = 32
"""How many given-up lanes a backend keeps; each costs an agent's memory and sockets and no processor time."""


class NixlOptions(msgspec.Struct, frozen=True):
    """What `open_backend` takes as options.

    ``drain_s``: seconds that a lane being closed waits for its transfers to end. ``abandon``: what becomes of a lane
    whose transfers did not end. ``destroy`` destroys it. ``park`` keeps it (`kvd.backends.nixl.lane.Parked`), which is
    safe for our memory only where all transports are software. ``auto`` parks it where they surely are, as that spares
    the peer an abort. ``copy_threads``: how many threads copy a large read of host memory, each with an agent of its
    own, where UCX copies within the post (`kvd.backends.split_lane`).
    """

    drain_s: float = 0.1
    abandon: Annotated[Literal["auto", "park", "destroy"], Meta(description="auto, park or destroy")] = "auto"
    copy_threads: CopyThreads = 2


def open_backend(name: str, *, options: Mapping[str, Any]) -> NixlBackend:
    """A worker's NIXL backend; ``options`` as in `NixlOptions`.

    Raises:
        BackendUnavailable: NIXL is not installed, or UCX does not start here.
        BackendError: an unknown option.
    """
    return NixlBackend(name, read_options(NixlOptions, options, backend=NAME), load())


def check_window(card: bytes, announced: bytes) -> None:
    """Refuse a window of another agent's, or over other memory. Raises `ForeignWindow` and `PeerMetadataError`."""
    same_worker(card, announced, backend=NAME, name_of=before_last_dot)


class NixlBackend(EngineBackend[NixlLane | SplitLane]):
    """A worker's registered memory. A thread of NIXL's answers the peers that read from it, and sleeps between.

    ``traits.lands`` is settled once memory is registered.
    """

    traits = Traits(synchronous=True, strided_lists=True)

    def __init__(self, name: str, options: NixlOptions, library: NixlLibrary) -> None:
        super().__init__(name, NAME)
        self._options = options
        self._library = library
        self._agent, self.serving = threads_started(lambda: Agent(library, name, progress=True))
        self._parked: deque[Parked] = deque()
        self._parks = options.abandon == "park"
        self._no_window = ""

    def _register(self, regions: Sequence[Region]) -> None:
        check_regions(regions, backend=NAME, kinds=tuple(MEMORY))
        if self._parks and (device := next((r.device for r in regions if r.device != "cpu"), None)):
            raise RegistrationError(
                f"option abandon is park and memory is on {device}, which copies by itself: a parked lane would write",
                backend=NAME,
                hint="leave the option abandon at auto",
            )
        self._agent.register(regions)
        if self._options.abandon == "auto":
            self._parks = software_only(os.environ, regions)
        self._no_window = refusal(os.environ, regions)
        self.traits = replace(self.traits, lands=not self._no_window)

    def _describe(self) -> bytes:
        blob = bytes(self._agent.call("export metadata", "get_agent_metadata"))
        return pack(Envelope(NAME, self._library.version, self._agent.name, self.regions, blob))

    def _lane(self, name: str) -> NixlLane | SplitLane:
        """An agent of its own with the same memory registered, or several where they may copy."""
        threads = self._options.copy_threads if software_only(os.environ, self.regions) else 1
        return split(name, NAME, threads, self._one_agent, self._drop)

    def _one_agent(self, name: str) -> NixlLane:
        return NixlLane(
            name,
            self._registered(f"{self.name}.{name}", {}),
            self.regions,
            drain_s=self._options.drain_s,
            park=self._park if self._parks else None,
            closed=self._drop,
        )

    def window(self, name: str) -> NixlWindow:
        """A fresh window for one peer engine: an agent of its own with the same memory registered.

        Raises:
            BackendUnavailable: UCX does not start another agent, or none here is both safe and of use
                (``traits.lands`` is false then).
            RegistrationError: nothing is registered yet, or the memory cannot be registered once more.
        """
        self._ready()
        if self._no_window:
            raise BackendUnavailable(f"no window: {self._no_window}", backend=NAME)
        agent = self._registered(f"{self.name}.{name}", SHIELD)
        return self._keep(NixlWindow(name, agent, self.regions, self._drop))

    def _end(self) -> None:
        while self._parked:
            self._parked.popleft().destroy()
        self._agent.destroy()

    def _registered(self, name: str, ucx: Mapping[str, str]) -> Agent:
        """One more agent over the backend's memory, which only calls into it advance."""
        device = cuda_driver.ordinal(self.regions)
        agent = Agent(self._library, name, progress=False, ucx=ucx, device=device)
        try:
            agent.register(self.regions)
        except BackendError:
            agent.destroy()
            raise
        return agent

    def _park(self, parked: Parked) -> None:
        self._parked.append(parked)
        if len(self._parked) > PARKED_LIMIT:
            oldest = self._parked.popleft()
            _log.warning(
                "%d lanes given up with reads under way are parked; destroying the oldest, %s, which may end its "
                "peer's process if that is stopped and not dead",
                PARKED_LIMIT,
                oldest.agent.name,
            )
            oldest.destroy()
