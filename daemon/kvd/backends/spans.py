"""On which device each address of a descriptor column lives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.backends.envelope import joined
from kvd.backends.errors import BackendError, RegistrationError
from kvd.geometry.model import Region
from kvd.topology.descriptors import Int64


def parse_device(device: str) -> tuple[str, int]:
    """Kind and ordinal of a device name: ``"cpu"`` is ("cpu", 0), ``"cuda:1"`` is ("cuda", 1).

    Raises:
        BackendError: not a device name.
    """
    kind, _, ordinal = device.partition(":")
    if not kind.isalpha() or not (ordinal or "0").isdecimal():
        raise BackendError(f"device {device!r} is not of the form 'cpu' or 'cuda:N'")
    return kind, int(ordinal or "0")


def only_device(regions: Sequence[Region], *, backend: str) -> str:
    """The device that all of these regions are on.

    Raises:
        RegistrationError: nothing given, a region that is empty, or several devices; in the name of ``backend``.
    """
    if not regions:
        raise RegistrationError("no regions to register", backend=backend)
    for region in regions:
        if region.length <= 0 or region.address <= 0:
            raise RegistrationError(f"{region} cannot be registered: it is empty", backend=backend)
    devices = sorted({region.device for region in regions})
    if len(devices) > 1:
        raise RegistrationError(f"memory of {' and '.join(devices)}: one device only", backend=backend)
    return devices[0]


class Spans:
    """The registered memory of one worker, to be asked which device an address is on.

    ``devices`` are its distinct devices. An address outside every span gets the device of the nearest span below it (or
    the first): whether memory is registered is for the engine to say, in its own words.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        spans = joined(regions)
        self.devices: tuple[str, ...] = tuple(dict.fromkeys(s.device for s in spans))
        self._starts = np.array([s.address for s in spans], np.int64)
        self._device = np.array([self.devices.index(s.device) for s in spans], np.int64)

    def locate(self, addresses: Int64) -> Int64:
        """For each address the index into ``devices``; shape as ``addresses``."""
        if len(self.devices) < 2:
            return np.zeros(len(addresses), np.int64)
        below: Int64 = np.searchsorted(self._starts, addresses, side="right") - 1
        return self._device.take(np.maximum(below, 0))
