"""Host memory that stands in for a worker's KV memory, and the copies between the two.

Every span of KV memory has a *mirror* of its size, at which a transfer engine reads and writes in its place. For memory
on a GPU the mirror is registered with CUDA, so that one kernel moves scattered pieces over PCIe in either direction.
Mirrors are in memfds, so that peers on this host can map them (`kvd.backends.staged.near`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvd.backends.direct.cuda.copies import CudaCopier, Flight, engine
from kvd.backends.direct.cuda.tables import job_of_descriptors
from kvd.backends.direct.host.copy import Copy
from kvd.backends.direct.memfd import memfd
from kvd.backends.errors import RegistrationError
from kvd.backends.regions import parse_device
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

NAME = "staged"
_PORTABLE_AND_MAPPED = 3
"""Of cudaHostRegister: for every context, and for kernels."""


Carrier = Callable[[Descriptors], Flight]
"""Starts copying rows from their remote addresses to their local ones, KV memory and mirror; on one thread at a time.

Raises OSError or RuntimeError where an address is none of ours, or the device would not take it."""


def copy_on_host(rows: Descriptors) -> Flight:
    """Copy within this process's memory: it is done when it was begun."""
    copy, own = Copy(rows), os.getpid()
    while not copy.complete:
        copy.advance(own)
    return _Done()


@dataclass(frozen=True, slots=True)
class _Done:
    seconds: float = 0.0

    def done(self, *, wait: bool = False) -> bool:  # noqa: ARG002 - as the protocol has it
        return True


def device_carrier(ordinal: int, ctas: int) -> Carrier:
    """Copies with the kernel of direct reads, which walks through scattered pieces wherever the device sees them."""
    copier = CudaCopier(engine(ordinal), ctas, bulk_copies=False)

    def begin(rows: Descriptors) -> Flight:
        table, job = job_of_descriptors(rows)
        return copier.begin(table, None, job)

    return begin


class Mirrors:
    """The mirrors of some spans: zeroed memory of their own, registered with the device that the spans are on."""

    def __init__(self, spans: Sequence[Region], *, mapped: bool = False) -> None:
        """In memfds that peers can map where they are to be ``mapped``.

        Raises:
            RegistrationError: there is not so much memory, or the device does not take it.
        """
        self._maps: list[mmap.mmap] = []
        self._addresses: list[int] = []
        self._registered: list[int] = []
        self._device = spans[0].device if spans else "cpu"
        try:
            for span in spans:
                made = memfd("kvd-mirror", span.length) if mapped else mmap.mmap(-1, span.length)
                self._maps.append(made)
                self._addresses.append(int(np.frombuffer(self._maps[-1], np.uint8).ctypes.data))
                self._lock(self._addresses[-1], span.length)
        except (OSError, RegistrationError, RuntimeError) as error:
            self.close()
            size = sum(span.length for span in spans)
            raise RegistrationError(
                f"no host memory for a mirror of {size} bytes of KV memory: {error}",
                backend=NAME,
                hint="a staged engine needs as much locked host memory as it has KV memory",
            ) from None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each span's mirror begins."""
        return tuple(self._addresses)

    def carrier(self, ctas: int) -> Carrier:
        """What copies between the spans and their mirrors."""
        kind, ordinal = parse_device(self._device)
        return device_carrier(ordinal, ctas) if kind == "cuda" else copy_on_host

    def close(self) -> None:
        """Give the memory back: nothing may read or write it any more. Idempotent."""
        if self._registered:
            import torch

            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered = []
        while self._maps:
            with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the process
                self._maps[-1].close()
            self._maps.pop()

    def _lock(self, address: int, length: int) -> None:
        kind, ordinal = parse_device(self._device)
        if kind == "cpu":
            return
        import torch

        with torch.cuda.device(ordinal):
            error = torch.cuda.cudart().cudaHostRegister(address, length, _PORTABLE_AND_MAPPED)
        if int(error):
            raise RegistrationError(f"CUDA does not register it: {error}", backend=NAME)
        self._registered.append(address)
