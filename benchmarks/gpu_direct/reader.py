"""The process that reads: its memory, its lanes, and what became of a copy."""
# ruff: noqa: S101 - a script

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_direct.owner import MIB, Owner, pattern, regions
from kvd.backends.contract import State, Transfer
from kvd.backends.direct.backend import DirectBackend, DirectOptions
from kvd.backends.direct.cuda.lane import CudaLane
from kvd.topology.descriptors import Descriptors
from kvd.topology.grid import BlockSelection

UNTOUCHED = 0xEE


@dataclass
class Reader:
    """This process: memory on a device, backends over it, and what was seen."""

    device: str
    memory: list[Any]
    seen: dict[str, Any]

    def backend(self, ctas: int = DirectOptions().ctas) -> DirectBackend:
        """A backend over the memory, for copies of ``ctas`` thread blocks."""
        backend = DirectBackend("reader", DirectOptions(ctas=ctas))
        backend.register(regions(self.memory))
        return backend

    def lane(self, peer: Owner, ctas: int = DirectOptions().ctas) -> CudaLane:
        """A lane to an owner, of a backend of its own."""
        lane = self.backend(ctas).lane("owner")
        assert isinstance(lane, CudaLane)
        lane.add("p", peer.metadata)
        return lane

    def clear(self) -> None:
        """Make all bytes those that nothing was copied to."""
        for tensor in self.memory:
            tensor.fill_(UNTOUCHED)
        torch.cuda.synchronize(self.device)

    def wrong(self, peer: Owner, rows: Descriptors) -> int:
        """How many bytes, of all, are not what they should be after ``rows`` were copied onto cleared memory."""
        count = 0
        for number, tensor in enumerate(self.memory):
            base, there = tensor.data_ptr(), peer.addresses[number]
            inside = (rows.local >= base) & (rows.local < base + len(tensor))
            expected = torch.full_like(tensor, UNTOUCHED)
            for length in np.unique(rows.length[inside]):
                chosen = inside & (rows.length == length)
                at = torch.from_numpy(rows.local[chosen] - base).to(self.device)
                source = torch.from_numpy(rows.remote[chosen] - there).to(self.device)
                step, within = max(1, 64 * MIB // int(length)), torch.arange(int(length), device=self.device)
                for first in range(0, len(at), step):
                    part = slice(first, first + step)
                    places = (at[part, None] + within).ravel()
                    expected[places] = pattern((source[part, None] + within).ravel(), number)
            count += int((expected != tensor).sum().item())
        return count


def wait(lane: CudaLane, transfer: Transfer) -> Transfer:
    """Until it ended."""
    while lane.poll(transfer) is State.PENDING:
        pass
    return transfer


def finished(lane: CudaLane, transfer: Transfer) -> Transfer:
    """Until it ended well."""
    if wait(lane, transfer).state is not State.DONE:
        raise RuntimeError(transfer.reason)
    return transfer


def begun(lane: CudaLane, copies: BlockSelection | Descriptors) -> Transfer:
    """Start copying, by number or by address."""
    if isinstance(copies, BlockSelection):
        return lane.submit_selection("p", copies)
    return lane.submit("p", copies)


def timed(lane: CudaLane, copies: BlockSelection | Descriptors, times: int = 8) -> dict[str, Any]:
    """Medians of some copies after one that is not counted: on the device, in the call, in all; GB/s of the first."""
    device, call, whole = [], [], []
    for number in range(times + 1):
        began = time.perf_counter()
        transfer = begun(lane, copies)
        posted = time.perf_counter()
        finished(lane, transfer)
        if number:
            whole.append(time.perf_counter() - began)
            call.append(posted - began)
            device.append(transfer.detail["device_seconds"])
    middle = statistics.median(device)
    return {
        "gb_s": round(transfer.bytes / middle / 1e9, 1),
        "device_ms": round(middle * 1e3, 4),
        "call_ms": round(statistics.median(call) * 1e3, 4),
        "whole_ms": round(statistics.median(whole) * 1e3, 4),
        "mib": round(transfer.bytes / MIB, 2),
    }
