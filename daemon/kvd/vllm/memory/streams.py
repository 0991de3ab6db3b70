"""Events of a device's stream, made with torch: whether the device has come as far as it was told to by then."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from kvd.backends.cuda import driver as cuda_driver
from kvd.worker.streams.event import StreamEvent, no_event


class _Recorded:
    """An event of torch that was recorded. With an ``index`` it is of that CUDA device.

    Once nobody looks at it any more its event goes back to those that are ``free``.
    """

    __slots__ = ("_event", "_free", "_index")

    def __init__(self, event: Any, free: deque[Any], index: int | None) -> None:
        self._event = event
        self._free = free
        self._index = index

    def __del__(self) -> None:
        self._free.append(self._event)

    def __call__(self) -> bool:
        self._enter()
        return bool(self._event.query())

    def wait(self) -> None:
        """Return once the device has come there; torch lets go of Python's lock meanwhile."""
        self._enter()
        self._event.synchronize()

    def _enter(self) -> None:
        if self._index is not None:
            # In a thread that has no device the CUDA runtime would take up device 0.
            cuda_driver.enter(self._index)


def event_recorder(device: str) -> Callable[[], StreamEvent | None]:
    """What records events on the current stream of a kind of device: ``cpu``, ``cuda``, ...

    To be called, like what it gives, where the worker's device is current. An event may be asked on any thread, and
    never waits unless it is told to.
    """
    if device == "cpu":
        return no_event
    import torch

    if device == "cuda":
        index = torch.cuda.current_device()
        # Who waits for one that is not ``blocking`` keeps a core busy.
        make = functools.partial(torch.cuda.Event, blocking=True)
    else:
        index, make = None, functools.partial(torch.Event, device)
    free: deque[Any] = deque()

    def record() -> _Recorded:
        """With an event of before, if there is one: the device takes longer to make another."""
        try:
            event = free.pop()
        except IndexError:
            event = make()
        event.record()
        return _Recorded(event, free, index)

    return record


def stream_handle(device: str) -> Callable[[], int] | None:
    """What gives the handle of the current stream of a kind of device, to be called where a step is queued.

    The host has one in name only: what comes before a step there is over when it begins. None for other devices.
    """
    if device == "cpu":
        return lambda: 0
    if device != "cuda":
        return None
    import torch

    return lambda: int(torch.cuda.current_stream().cuda_stream)
