"""Events of a device's stream: whether the device has come as far as it was told to when the event was made."""

from __future__ import annotations

from collections.abc import Callable

StreamEvent = Callable[[], bool]
"""Whether the device has come there. Never waits, and may be asked on any thread."""


def no_event() -> StreamEvent | None:
    """For devices that have done what they were told when the call returns."""
    return None
