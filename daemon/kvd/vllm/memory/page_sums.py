"""What adds up a worker's KV on its device: torch, by the definition that numpy follows in host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.geometry.model import Layer, Region, WorkerGeometry
from kvd.topology.checksums.sums import MIX, Recipe, Summer, Words
from kvd.topology.descriptors import Flags, Int64
from kvd.worker.checksums.pages import in_host_memory

DEVICE_CHUNK = 16 << 20
"""Bytes that a device adds up at a time; what is computed of them takes about four times as much of its memory."""


def summer_of(geometry: WorkerGeometry) -> Summer:
    """What adds up the pages of a worker."""
    if all(region.device == "cpu" for region in geometry.regions):
        return in_host_memory(geometry)
    return OnDevice(geometry.regions)


class _Span:
    """A region as torch takes it over without copying."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "data": (region.address, False), "shape": (region.length,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


class OnDevice:
    """Sums of memory on a device, on a stream of their own, which waits for nothing: the caller has waited.

    ``spans`` are the regions' bytes as tensors, for tests; without them they are made from the addresses.
    """

    chunk = DEVICE_CHUNK

    def __init__(self, regions: Sequence[Region], spans: Sequence[Any] | None = None) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(regions[0].device)
        self._spans = (
            list(spans)
            if spans is not None
            else [torch.as_tensor(_Span(region), device=region.device) for region in regions]
        )
        self._streams = threading.local()
        self._known: dict[int, tuple[Recipe, Any, Any, Any]] = {}

    def sums(self, layer: Layer, how: Recipe, ids: Int64, tokens: Words, counted: Flags) -> Words:
        """As `kvd.topology.checksums.sums.Summer` says."""
        torch = self._torch
        if self._device.type == "cpu":
            return self._sums(layer, how, ids, tokens, counted)
        if not hasattr(self._streams, "own"):
            # In a thread of its own the current device is the first, whichever this worker has.
            torch.cuda.set_device(self._device)
            self._streams.own = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._streams.own):
            return self._sums(layer, how, ids, tokens, counted)

    def _sums(self, layer: Layer, how: Recipe, ids: Int64, tokens: Words, counted: Flags) -> Words:
        torch = self._torch
        weights, places, cells = self._constants(how)
        words = self._words(layer, how, ids)
        words *= weights
        mixed = words.sum(-1).reshape(len(ids), len(how.places), len(how.tokens))
        mixed += self._there(tokens)[:, None, :] * places[:, None]
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        mixed *= _signed(MIX)
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        made = torch.zeros(len(ids), len(counted), len(how.cells), dtype=torch.int64, device=self._device)
        for which, mask in enumerate(counted):
            kept = mixed if mask.all() else mixed * self._there(mask.astype(np.uint64))[:, None, :]
            made[:, which].index_add_(1, cells, kept.sum(2))
        sums: Words = made.cpu().numpy().view(np.uint64)
        return sums

    def _words(self, layer: Layer, how: Recipe, ids: Int64) -> Any:
        """Units of these pages as int64 without a sign, shape (blocks, ..., a row's)."""
        torch = self._torch
        span, at = self._spans[layer.region], layer.offset + how.offset
        strides = (layer.stride, *how.strides)
        unit = how.unit
        blocks = (len(span) - at - how.reach) // layer.stride + 1
        which = torch.from_numpy(np.ascontiguousarray(ids)).to(self._device)
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        even = all(n % unit == 0 for n in (at, *strides, span.data_ptr()))
        if even:
            flat = span[: len(span) // unit * unit].view(kinds[unit])
            pages = flat.as_strided((blocks, *how.extents), tuple(s // unit for s in strides), at // unit)
            found = pages.index_select(0, which)
        else:  # units that do not stand at multiples of their size are put together from bytes
            pages = span.as_strided((blocks, *how.extents, unit), (*strides, 1), at)
            found = pages.index_select(0, which).contiguous().view(kinds[unit]).squeeze(-1)
        words = found.reshape(len(ids), -1, len(how.weights)).to(torch.int64)
        return words & ((1 << 8 * unit) - 1) if unit in (2, 4) else words

    def _constants(self, how: Recipe) -> tuple[Any, Any, Any]:
        """A recipe's numbers on the device; recipes are few and live as long as the process."""
        known = self._known.get(id(how))
        if known is None:
            cells = np.zeros(len(how.places), np.int64)
            cells[list(how.cells[1:])] = 1
            known = how, self._there(how.weights), self._there(how.places), self._there(np.cumsum(cells))
            self._known[id(how)] = known
        return known[1:]

    def _there(self, numbers: NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(numbers).view(np.int64).copy()).to(self._device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
