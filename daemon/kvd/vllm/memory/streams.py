"""Marks on a device's stream: whether it has come as far as it was told to when the mark was made."""

from __future__ import annotations

from collections.abc import Callable

from kvd.backends.cuda import driver as cuda_driver
from kvd.worker.stream_event import StreamEvent, no_event


def marker(device: str) -> Callable[[], StreamEvent | None]:
    """What makes marks on the current stream of a kind of device: ``cpu``, ``cuda``, ...

    To be called, like what it gives, where the worker's device is current. A mark may be asked on any thread, and never
    waits.
    """
    if device == "cpu":
        return no_event
    import torch

    index = torch.cuda.current_device() if device == "cuda" else None

    def mark() -> StreamEvent:
        event = torch.Event(device)
        event.record()

        def ready() -> bool:
            if index is not None:
                # In a thread that has no device the CUDA runtime would take up device 0.
                cuda_driver.enter(index)
            return bool(event.query())

        return ready

    return mark
