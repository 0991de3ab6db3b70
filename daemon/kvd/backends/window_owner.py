"""Whether what is to be written to is the memory of the worker that a card describes.

A window is announced by a message, and the card of the worker came from the host that it is on. What a writer is told
to write to has to be of that worker: the same memory, under a name that begins with the worker's.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.backends.envelope import Envelope, unpack
from kvd.backends.errors import ForeignWindow


def same_worker(
    card: bytes, announced: bytes, *, backend: str, name_of: Callable[[str], str]
) -> tuple[Envelope, Envelope]:
    """The envelopes of a worker's card and of a window of its; ``name_of`` an agent is its worker's name.

    Raises:
        ForeignWindow: the window is another worker's, or over other memory.
        PeerMetadataError: one of the two cannot be read.
    """
    worker, window = unpack(card, backend=backend), unpack(announced, backend=backend)
    name = name_of(worker.agent)
    wrong = ""
    if window.agent != worker.agent and not window.agent.startswith(f"{name}."):
        wrong = f"is of {window.agent!r}, and the card of the worker of {worker.agent!r}"
    elif window.version != worker.version:
        wrong = f"is of release {window.version}, and the worker of {worker.version}"
    elif window.regions != worker.regions:
        wrong = f"is over {len(window.regions)} regions that are not the {len(worker.regions)} of the worker's card"
    if wrong:
        raise ForeignWindow(
            f"the window that was announced {wrong}",
            backend=backend,
            hint="the decoder's worker was replaced, or somebody else announced it: nothing is written",
        )
    return worker, window


def before_last_dot(agent: str) -> str:
    """The worker's name in that of an agent with a suffix that is new each time."""
    return agent.rpartition(".")[0]
