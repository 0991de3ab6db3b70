"""A window that is announced is of the worker whose card is known, or nothing is written."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvd.backends.contract import WindowBackend
from kvd.backends.envelope import Envelope, pack
from kvd.backends.errors import ForeignWindow, PeerMetadataError
from kvd.backends.mooncake.target import EngineTarget
from kvd.backends.registry import check_window, open_backend
from kvd.geometry.model import Region
from tests.support.raising import raises

MEMORY = np.zeros(1 << 16, np.uint8)
HERE, OTHER = Region(MEMORY.ctypes.data, 1 << 15), Region(MEMORY.ctypes.data + (1 << 15), 1 << 15)


def opened(kind: str, name: str, *regions: Region) -> WindowBackend:
    if kind == "nixl":
        pytest.importorskip("nixl", exc_type=ImportError)
    backend = open_backend(kind, name, {})
    assert isinstance(backend, WindowBackend)
    backend.register(regions)
    return backend


@pytest.mark.parametrize("kind", ["memory", "nixl"])
def test_a_workers_windows_are_its_own_and_nobody_elses(kind: str) -> None:
    decoder, other, elsewhere = (
        opened(kind, "d-tp0", HERE), opened(kind, "liar", HERE), opened(kind, "d-tp0", OTHER),
    )  # fmt: skip
    card = decoder.metadata()
    windows = [decoder.window("p"), decoder.window("p")]
    for window in windows:
        check_window(kind, card, window.metadata())
    check_window(kind, card, card)
    stolen, displaced = other.window("p"), elsewhere.window("p")
    with raises("KVD-BACKEND-LANDING", match="liar"):
        check_window(kind, card, stolen.metadata())
    with raises("KVD-BACKEND-LANDING", match="regions"):
        check_window(kind, card, displaced.metadata())
    for window in (*windows, stolen, displaced):
        window.close()
    for backend in (decoder, other, elsewhere):
        backend.close()


def test_a_name_that_only_begins_alike_is_another_workers() -> None:
    card, other = opened("memory", "d-tp1", HERE), opened("memory", "d-tp10", HERE)
    window = other.window("p")
    with pytest.raises(ForeignWindow):
        check_window("memory", card.metadata(), window.metadata())


@pytest.mark.parametrize("kind", ["memory", "nixl", "mooncake"])
@pytest.mark.parametrize("landing", [b"landing", b"KVDM\0\1\0\0\0\1{", b"\0" * 100])
def test_what_is_no_window_is_refused(kind: str, landing: bytes) -> None:
    card = pack(Envelope("memory", "1", "d-tp0.1", (HERE,), b""))
    with pytest.raises(PeerMetadataError):
        check_window(kind, card, landing)


@pytest.mark.parametrize("kind", ["direct", "auto", "staged"])
def test_backends_that_nobody_writes_to_have_no_windows(kind: str) -> None:
    with pytest.raises(ForeignWindow, match=kind):
        check_window(kind, b"card", b"landing")


def test_a_mooncake_window_is_at_the_address_of_its_worker() -> None:
    def told(name: str, session: str, protocol: str = "tcp") -> bytes:
        target = EngineTarget(session, protocol, "00", 1)
        return pack(Envelope("mooncake", "0.3", name, (HERE,), msgspec.json.encode(target)))

    card = told("d-tp0", "10.0.0.8:12001")
    check_window("mooncake", card, told("d-tp0.p", "10.0.0.8:12077"))
    with pytest.raises(ForeignWindow, match=r"10\.0\.0\.66:12077"):
        check_window("mooncake", card, told("d-tp0.p", "10.0.0.66:12077"))
    with pytest.raises(PeerMetadataError):
        check_window("mooncake", card, told("d-tp0.p", "10.0.0.8:12077", "rdma"))
