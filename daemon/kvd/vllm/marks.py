"""Marks on a device's stream: whether it has come as far as it was told to when the mark was made."""

from __future__ import annotations

from collections.abc import Callable

from kvd.vllm.outgoing import Ready


def no_mark() -> Ready | None:
    """For devices that have done what they were told when the call returns."""
    return None


def marker(device: str) -> Callable[[], Ready | None]:
    """What makes marks on the current stream of a kind of device: ``cpu``, ``cuda``, ..."""
    if device == "cpu":
        return no_mark
    import torch

    def mark() -> Ready:
        event = torch.Event(device)
        event.record()
        ready: Ready = event.query
        return ready

    return mark
