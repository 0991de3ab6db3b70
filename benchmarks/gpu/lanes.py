"""Notes when the bytes of lanes have moved and when pushed steps have ended, inside a worker of a measured engine.

Times are CLOCK_MONOTONIC, the same for all processes of a host. A transfer counts as done when whoever posted it saw
that, which is a little late.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

Notes = list[dict[str, Any]]


def watch_lanes(half: Any, notes: Notes) -> None:
    """Have all lanes of a `WorkerHalf`, those that are there and those to come, note the bytes they moved."""
    backend = half._backend  # noqa: SLF001 - there is no public way in
    for one in gc.get_objects():
        if _is_lane(one):
            _noting(one, notes)
    made = type(backend)

    def lane(self: Any, name: str) -> Any:
        return _noting(made.lane(self, name), notes)

    backend.__class__ = type(made.__name__, (made,), {"__slots__": (), "lane": lane})


def watch_steps(half: Any, notes: Notes) -> None:
    """Note when the device has done a step that computes something to be pushed."""
    pushing = half.pushing
    stepped = pushing.stepped
    on_device = any(not region.device.startswith("cpu") for region in half.geometry.regions)

    def watched() -> None:
        stepped()
        if not on_device:
            notes.append({"what": "step", "at": time.monotonic()})
            return
        import torch

        event = torch.cuda.Event()
        event.record()
        device = torch.cuda.current_device()
        threading.Thread(target=_note_step, args=(event, device, notes), daemon=True).start()

    pushing.stepped = watched


def _note_step(event: Any, device: int, notes: Notes) -> None:
    import torch

    torch.cuda.set_device(device)
    event.synchronize()
    notes.append({"what": "step", "at": time.monotonic()})


def _is_lane(one: object) -> bool:
    made = type(one)
    return str(getattr(made, "__module__", "")).startswith("kvd.backends.") and all(
        hasattr(made, name) for name in ("add", "submit", "poll", "close")
    )


def _noting(lane: Any, notes: Notes) -> Any:
    from kvd.backends.contract import State

    made = type(lane)

    def note(transfer: Any) -> Any:
        notes.append({"what": "moved", "at": time.monotonic(), "bytes": transfer.bytes})
        return transfer

    def poll(self: Any, transfer: Any) -> Any:
        before = transfer.state
        state = made.poll(self, transfer)
        if state is State.DONE and before is not State.DONE:
            note(transfer)
        return state

    def submit(self: Any, *arguments: Any, **named: Any) -> Any:
        transfer = made.submit(self, *arguments, **named)
        return note(transfer) if transfer.state is State.DONE else transfer

    def submit_selection(self: Any, *arguments: Any, **named: Any) -> Any:
        transfer = made.submit_selection(self, *arguments, **named)
        return note(transfer) if transfer.state is State.DONE else transfer

    members: dict[str, Any] = {"__slots__": (), "poll": poll, "submit": submit}
    if hasattr(made, "submit_selection"):
        members["submit_selection"] = submit_selection
    lane.__class__ = type(made.__name__, (made,), members)
    return lane
