"""Marks: random bytes in an engine's registered memory that prove to a peer whose engine answers.

Beside each there is room for one that this engine reads. NVLink moves memory of devices only, so there both lie on one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvd.backends.cuda import driver as cuda_driver
from kvd.geometry.model import Region

MARK_BYTES = 16
BLOCK_BYTES = 2 << 20
"""What a device's allocations are made of: less would be shared with peers together with somebody else's."""


@dataclass(frozen=True, slots=True)
class EngineMark:
    """``value`` stands at ``address``, inside ``region``, which is to be registered as long as the mark is needed.

    ``scratch_address`` is where a peer's mark is read to, and ``scratch`` gives what stands there.
    """

    region: Region
    address: int
    value: bytes
    scratch: Callable[[], bytes]

    @property
    def scratch_address(self) -> int:
        """`MARK_BYTES` of registered memory that nobody else writes."""
        return self.address + MARK_BYTES


def host_mark() -> EngineMark:
    """A mark of its own memory on the host."""
    value = secrets.token_bytes(MARK_BYTES)
    memory = np.frombuffer(bytearray(value + bytes(MARK_BYTES)), np.uint8)
    address = int(memory.ctypes.data)
    # What gives the scratch keeps the memory.
    return EngineMark(
        Region(address, memory.nbytes), address, value, lambda: bytes(memory[MARK_BYTES:].tobytes())
    )


class DeviceMarks:
    """One block of a CUDA device's memory, from which all engines of a backend take their marks."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._block = Region(cuda_driver.allocate(device, BLOCK_BYTES), BLOCK_BYTES, f"cuda:{device}")
        self._numbers = itertools.count()
        self._open = True

    def take(self) -> EngineMark:
        """The next mark, of which only the last 65,536 are good."""
        value = secrets.token_bytes(MARK_BYTES)
        offset = next(self._numbers) * 2 * MARK_BYTES % self._block.length
        address = self._block.address + offset
        cuda_driver.write(self._device, address, value + bytes(MARK_BYTES))
        read = partial(cuda_driver.read, self._device, address + MARK_BYTES, MARK_BYTES)
        return EngineMark(self._block, address, value, read)

    def close(self) -> None:
        """Give the block back, once all engines that registered it are gone. Idempotent."""
        if self._open:
            self._open = False
            cuda_driver.free(self._device, self._block.address)
