"""Events of a device's stream, made with torch: whether the device has come as far as it was told to by then."""

from __future__ import annotations

from collections.abc import Callable

from kvd.backends.cuda import driver as cuda_driver
from kvd.worker.stream_event import StreamEvent, no_event


def event_recorder(device: str) -> Callable[[], StreamEvent | None]:
    """What records events on the current stream of a kind of device: ``cpu``, ``cuda``, ...

    To be called, like what it gives, where the worker's device is current. An event may be asked on any thread, and
    never waits.
    """
    if device == "cpu":
        return no_event
    import torch

    index = torch.cuda.current_device() if device == "cuda" else None

    def record_event() -> StreamEvent:
        event = torch.Event(device)
        event.record()

        def reached() -> bool:
            if index is not None:
                # In a thread that has no device the CUDA runtime would take up device 0.
                cuda_driver.enter(index)
            return bool(event.query())

        return reached

    return record_event
