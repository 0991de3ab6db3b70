"""Registered memory: what lies inside, on which device, and where a reader sees it."""

import numpy as np
import pytest

from kvd.backends.errors import RegistrationError, TransferRefused
from kvd.backends.regions import RegisteredMemory, check_regions, checked
from kvd.geometry.model import Region
from kvd.topology.descriptors import Descriptors

MEMORY = RegisteredMemory([Region(1000, 100), Region(1100, 50), Region(2000, 10)])
ANYWHERE = RegisteredMemory([Region(1, 1 << 40)])


def rows(*pieces: tuple[int, int]) -> Descriptors:
    address, length = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    return Descriptors(address, address, length)


def test_neighbouring_regions_are_one() -> None:
    inside = rows((1000, 150), (1149, 1), (2000, 10), (1050, 60))
    assert len(checked(inside, MEMORY, ANYWHERE, backend="x")) == 4


def test_nothing_is_inside_anything() -> None:
    none = np.zeros(0, np.int64)
    assert not len(checked(Descriptors(none, none, none), RegisteredMemory([]), MEMORY, backend="x"))


@pytest.mark.parametrize(
    ("address", "length"), [(999, 2), (1140, 11), (1150, 1), (2009, 2), (5000, 1), (3, 5000)]
)
def test_what_lies_across_a_gap_before_the_first_or_after_the_last_is_refused(
    address: int, length: int
) -> None:
    with pytest.raises(TransferRefused, match=rf"local descriptor 1, {length} bytes at {address:#x}"):
        checked(rows((1000, 1), (address, length)), MEMORY, ANYWHERE, backend="x")
    with pytest.raises(TransferRefused, match=rf"remote descriptor 1, {length} bytes at {address:#x}"):
        checked(rows((1000, 1), (address, length)), ANYWHERE, MEMORY, backend="x")


def test_a_length_that_ends_beyond_64_bits_is_not_inside() -> None:
    with pytest.raises(TransferRefused, match="local descriptor 1, 9223372036854775807 bytes at 0x3e8"):
        checked(rows((1000, 1), (1000, (1 << 63) - 1)), MEMORY, ANYWHERE, backend="x")


def test_remote_addresses_become_those_at_which_the_reader_sees_them() -> None:
    seen = RegisteredMemory([Region(1000, 100), Region(1100, 50)], [7000, 9000])
    found = checked(rows((1000, 1), (1099, 1), (1100, 2)), ANYWHERE, seen, backend="x")
    assert found.remote.tolist() == [7000, 7099, 9000]
    assert found.local.tolist() == [1000, 1099, 1100]
    with pytest.raises(TransferRefused, match="remote descriptor 0"):
        checked(rows((1099, 2)), ANYWHERE, seen, backend="x")


def test_each_address_has_the_device_of_its_region() -> None:
    memory = RegisteredMemory([Region(5000, 10, "cuda:1"), Region(1000, 10)])
    found = memory.device_of(np.array([1000, 5009, 9999, 3], np.int64))
    assert [memory.devices[index] for index in found.tolist()] == ["cpu", "cuda:1", "cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("regions", "says"),
    [
        ([], "no regions"),
        ([Region(4096, 0)], "it is empty"),
        ([Region(4096, 1, "tpu:0")], "kinds are cpu, cuda"),
    ],
)
def test_what_no_engine_registers_is_refused(regions: list[Region], says: str) -> None:
    with pytest.raises(RegistrationError, match=says):
        check_regions(regions, backend="x", kinds=("cpu", "cuda"))
