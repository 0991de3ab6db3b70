"""Events of a device's stream: whether the device has come as far as it was told to when the event was made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

StreamEvent = Callable[[], bool]
"""Whether the device has come there. Never waits, and may be asked on any thread."""
LOOK = 500e-6
"""Seconds between two looks at an event that cannot be waited for."""


@runtime_checkable
class WaitableEvent(Protocol):
    """A `StreamEvent` that a thread can wait for without taking Python's lock from others meanwhile."""

    def __call__(self) -> bool:
        """Whether the device has come there."""

    def wait(self) -> None:
        """Return once it has."""


def wait_for(event: StreamEvent) -> None:
    """Return once the device has come there. Raises whatever the device does."""
    if isinstance(event, WaitableEvent):
        event.wait()
        return
    while not event():
        time.sleep(LOOK)


def no_event() -> StreamEvent | None:
    """For devices that have done what they were told when the call returns."""
    return None
