"""Registered memory of one worker, and what must hold of the rows and cells that are to be copied in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvd.backends.errors import BackendError, RegistrationError, TransferRefused
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors, Int64
from kvd.topology.grid import BlockSelection, Int32, Selection


def parse_device(device: str) -> tuple[str, int]:
    """Kind and ordinal of a device name: ``"cpu"`` is ("cpu", 0), ``"cuda:1"`` is ("cuda", 1).

    Raises:
        BackendError: not a device name.
    """
    kind, _, ordinal = device.partition(":")
    if not kind.isalpha() or not (ordinal or "0").isdecimal():
        raise BackendError(f"device {device!r} is not of the form 'cpu' or 'cuda:N'")
    return kind, int(ordinal or "0")


def check_regions(regions: Sequence[Region], *, backend: str, kinds: Collection[str] = ()) -> None:
    """Refuse what no ``backend`` can register, and memory of other ``kinds`` of devices where any are given.

    Raises:
        RegistrationError: nothing given, a region that is empty, or of another kind.
    """
    if not regions:
        raise RegistrationError("no regions to register", backend=backend, hint="give at least one")
    for region in regions:
        if region.length <= 0 or region.address <= 0:
            raise RegistrationError(f"{region} cannot be registered: it is empty", backend=backend)
        if kinds and parse_device(region.device)[0] not in kinds:
            raise RegistrationError(
                f"{region} cannot be registered: kinds are {', '.join(kinds)}", backend=backend
            )


def only_device(regions: Sequence[Region], *, backend: str) -> str:
    """The device that all of these regions are on.

    Raises:
        RegistrationError: nothing given, a region that is empty, or several devices; in the name of ``backend``.
    """
    check_regions(regions, backend=backend)
    devices = sorted({region.device for region in regions})
    if len(devices) > 1:
        raise RegistrationError(f"memory of {' and '.join(devices)}: one device only", backend=backend)
    return devices[0]


def joined(regions: Sequence[Region]) -> list[Region]:
    """The regions by address, neighbours on one device made one: less to send, the same answer to "which device"."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.device, r.address)):
        last = found[-1] if found else None
        if last and last.device == region.device and last.address + last.length >= region.address:
            end = max(last.address + last.length, region.address + region.length)
            found[-1] = Region(last.address, end - last.address, last.device)
        else:
            found.append(region)
    return sorted(found, key=lambda r: r.address)


class RegisteredMemory:
    """The registered memory of one worker, to be asked what lies inside, on which device, and where it is seen here.

    ``devices`` are its distinct devices.
    """

    def __init__(self, regions: Sequence[Region], seen_at: Sequence[int] = ()) -> None:
        """``seen_at`` is where this process sees each region, and empty where addresses are the worker's own.

        With ``seen_at`` the regions are sorted by address and apart from each other; neighbours may be two.
        """
        regions = regions if seen_at else joined(regions)
        self.devices: tuple[str, ...] = tuple(dict.fromkeys(r.device for r in regions))
        self._first = np.array([r.address for r in regions], np.int64)
        self._end = np.array([r.address + r.length for r in regions], np.int64)
        self._device = np.array([self.devices.index(r.device) for r in regions], np.int64)
        self._move = np.array(seen_at, np.int64) - self._first if len(seen_at) else None

    @property
    def regions(self) -> int:
        """How many regions it is, neighbours joined."""
        return len(self._first)

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return int((self._end - self._first).sum())

    def device_of(self, addresses: Int64) -> Int64:
        """For each address the index into ``devices``; shape as ``addresses``.

        An address outside gets the device of the nearest region below it (or the first): whether memory is registered
        is for the engine to say, in its own words.
        """
        if len(self.devices) < 2:
            return np.zeros(len(addresses), np.int64)
        return self._device.take(self._region(addresses))

    def seen_at(self, addresses: Int64) -> Int64:
        """Where this process sees these addresses, which lie inside."""
        if self._move is None or not len(addresses):
            return addresses
        seen: Int64 = addresses + self._move[self._region(addresses)]
        return seen

    def outside(self, addresses: Int64, lengths: Int64) -> int | None:
        """The first row that does not lie inside one region."""
        if not len(addresses) or not len(self._first):
            return 0 if len(addresses) else None
        at = self._region(addresses)
        # The sum of an address and a length may be beyond 64 bits, and so be small.
        fits = (addresses >= self._first[at]) & (lengths <= self._end[at] - addresses)
        return None if fits.all() else int(np.argmin(fits))

    def _region(self, addresses: Int64) -> Int64:
        at: Int64 = np.maximum(np.searchsorted(self._first, addresses, side="right") - 1, 0)
        return at


def well_formed(descriptors: Descriptors, *, backend: str) -> Descriptors:
    """The descriptors with rows of no bytes left out.

    Raises:
        TransferRefused: columns of unequal length, or a negative address or length; in the name of ``backend``.
    """
    columns = (descriptors.local, descriptors.remote, descriptors.length)
    here, there, lengths = map(len, columns)
    if not here == there == lengths:
        raise TransferRefused(
            f"descriptor columns differ in length: {here} local, {there} remote, {lengths} lengths",
            backend=backend,
        )
    if not lengths:
        return descriptors
    least = [int(column.min()) for column in columns]
    if min(least) < 0:
        raise TransferRefused(
            f"a descriptor holds {min(least)}; addresses and lengths are not negative", backend=backend
        )
    if least[2]:
        return descriptors
    keep = descriptors.length > 0
    return Descriptors(*(column[keep] for column in columns))


def checked(
    descriptors: Descriptors, local: RegisteredMemory, remote: RegisteredMemory, *, backend: str
) -> Descriptors:
    """The descriptors with rows of no bytes left out, remote addresses as `RegisteredMemory.seen_at` gives them.

    Raises:
        TransferRefused: as `well_formed`, or a row outside the registered memory of its side.
    """
    kept = well_formed(descriptors, backend=backend)
    for side, addresses, memory in (("local", kept.local, local), ("remote", kept.remote, remote)):
        row = memory.outside(addresses, kept.length)
        if row is not None:
            raise TransferRefused(
                f"{side} descriptor {row}, {int(kept.length[row])} bytes at {int(addresses[row]):#x}, "
                "is not registered",
                backend=backend,
                hint="only registered memory is read or written",
            )
    return Descriptors(kept.local, remote.seen_at(kept.remote), kept.length)


def check_selection(selection: Selection | BlockSelection, *, backend: str) -> None:
    """Refuse cells that their grid does not have.

    Raises:
        TransferRefused: columns of unequal length, or such a cell; in the name of ``backend``.
    """
    here, there, grid = selection.local, selection.remote, selection.grid
    if len(here) != len(there):
        raise TransferRefused(
            f"a selection's columns differ in length: {len(here)} local, {len(there)} remote", backend=backend
        )
    for cells, count in ((here, len(grid) * grid.local_blocks), (there, len(grid) * grid.remote_blocks)):
        # As unsigned numbers negative ones are the largest of all: one pass finds both.
        if len(cells) and _largest(cells) >= count:
            raise TransferRefused(
                f"cells {int(cells.min())}..{int(cells.max())} picked of a grid of {count}", backend=backend
            )


def _largest(cells: Int32) -> int:
    return int(np.maximum.reduce(cells.view(np.uint32)))
