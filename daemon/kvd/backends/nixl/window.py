"""A NIXL window: an agent of its own over a worker's memory, for one peer engine to write through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import BackendError
from kvd.backends.lanes import EngineWindow
from kvd.backends.nixl.agent import Agent
from kvd.backends.nixl.library import INFINIBAND, NAME
from kvd.geometry.model import Region

SHIELD: Mapping[str, str] = {"SHM_DEVICES": ""}
"""UCX settings of a window's agent: no transport with which a writer reaches our memory from its own process.

CMA, KNEM, XPMEM and CUDA IPC copy in the *writer's* process and ask nobody here, so nothing done here would stop a
writer that was stopped and goes on later. UCX counts them all as devices of kind SHM; without any, what a window
exports is an address for tcp and for RDMA. UCX_TLS cannot say that: NIXL splits its settings at commas, and the
environment comes before them.
"""


def refusal(environ: Mapping[str, str], regions: Sequence[Region], infiniband: Path = INFINIBAND) -> str:
    """Why no safe and useful window can be made over ``regions``; empty where one can."""
    if environ.get("UCX_SHM_DEVICES"):
        return (
            f"UCX_SHM_DEVICES={environ['UCX_SHM_DEVICES']} makes a peer on this host write from its own process, which "
            "cannot be stopped from here: unset it"
        )
    on_device = next((region.device for region in regions if region.device != "cpu"), None)
    if on_device and not (infiniband.is_dir() and any(infiniband.iterdir())):
        return f"memory on {on_device} and no RDMA device: a peer could write over tcp only"
    return ""


class NixlWindow(EngineWindow):
    """What one peer engine writes into. Used from one thread at a time."""

    def __init__(
        self, name: str, agent: Agent, regions: Sequence[Region], closed: Callable[[NixlWindow], None]
    ) -> None:
        blob = bytes(agent.call("export metadata", "get_agent_metadata"))
        envelope = Envelope(NAME, agent.library.version, agent.name, tuple(regions), blob)
        super().__init__(name, pack(envelope), NAME, closed)
        self._agent = agent

    def progress(self) -> None:
        """Land what has come over tcp, with the GIL released: returns when nothing more is there at the moment.

        Raises:
            TransferRefused: the window is closed.
        """
        self._opened()
        # Asking for notifications is NIXL's way to make progress; there are none to keep.
        with suppress(BackendError):  # one connection of the peer's broke; it makes another
            self._agent.call("make progress", "get_new_notifs")

    def _stop(self) -> None:
        """What came over tcp lands only by `progress`; RDMA keys end with the registration, and that with the agent."""
        self._agent.destroy()
