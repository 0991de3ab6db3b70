"""What would move bytes between engines of two hosts, of what real backends export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

from kvctl.doctor.peer_transports import UNPROBED, told_by, transport_checks, way
from kvctl.views.doctor import Check
from kvd.backends.auto.metadata import read_both, write_both
from kvd.backends.direct.card import read_card
from kvd.backends.envelope import Envelope, pack, unpack
from kvd.backends.registry import open_backend
from kvd.geometry.model import Region
from kvd.wire.identity import Role
from kvd.wire.query import EngineRow
from tests.kvctl.conftest import engine_row

Exported = Callable[..., bytes]


@pytest.fixture
def exported() -> Iterator[Exported]:
    """What a backend of that kind exports; one for "another host" says so by its boot id."""
    with ExitStack() as stack:

        def export(kind: str, *, elsewhere: bool = False, **options: Any) -> bytes:
            memory = np.zeros(1 << 16, np.uint8)
            backend = open_backend(kind, "w", options)
            stack.callback(backend.close)
            backend.register([Region(memory.ctypes.data, memory.nbytes)])
            stack.callback(memory.fill, 0)  # it is kept until the backend is closed
            metadata = backend.metadata()
            return moved(kind, metadata) if elsewhere else metadata

        yield export


def moved(kind: str, metadata: bytes) -> bytes:
    """The same of another boot, as another host has."""
    if kind == "auto":
        both = read_both(metadata)
        return write_both(
            "w", msgspec.structs.replace(both, direct_metadata=moved("direct", both.direct_metadata))
        )
    envelope, card = read_card(metadata)
    process = msgspec.structs.replace(card.process, boot="another")
    blob = msgspec.json.encode(msgspec.structs.replace(card, process=process))
    return pack(Envelope("direct", envelope.version, envelope.agent, envelope.regions, blob))


def row(name: str, role: Role, backend: str, metadata: bytes) -> EngineRow:
    made = engine_row(name, role, 1)
    assert made.card is not None
    workers = tuple(
        msgspec.structs.replace(worker, backend=backend, metadata=metadata) for worker in made.card.workers
    )
    return msgspec.structs.replace(made, local=True, card=msgspec.structs.replace(made.card, workers=workers))


def checks(backend: str, here: bytes, there: bytes, other: str = "") -> list[Check]:
    """The checks of a decoder here and a prefiller there."""
    mine = row("decode-0", "decode", backend, here)
    theirs = row("prefill-0", "prefill", other or backend, there)
    return list(transport_checks([mine], [theirs], "10.0.0.8:7766"))


def pair(backend: str, here: bytes, there: bytes, other: str = "") -> list[tuple[str, str]]:
    """State and text of these."""
    return [(check.state, check.found) for check in checks(backend, here, there, other)]


def test_what_moves_bytes_is_told_and_that_nothing_was_moved(exported: Exported) -> None:
    for engine in ("nixl", "mooncake"):
        pytest.importorskip(engine)
    nixl, mooncake = exported("nixl"), exported("mooncake", protocol="tcp", host="127.0.0.1")
    ((state, found),) = pair("nixl", nixl, nixl)
    over = "over what it chooses when it connects"
    assert (state, found) == (
        "ok",
        f"decode-0 from prefill-0: nixl from host to host memory, {over}; {UNPROBED}",
    )
    ((state, found),) = pair("mooncake", mooncake, mooncake)
    assert (state, "mooncake from host to host memory, over tcp; not probed" in found) == ("ok", True)
    auto = exported("auto", engine="nixl")
    ((state, found),) = pair("auto", auto, moved("auto", auto))
    assert (state, "nixl behind auto from host to host memory" in found) == ("ok", True)
    ((state, found),) = pair("auto", auto, auto)
    assert (state, "direct from host to host memory, as both kvds are of one host" in found) == ("ok", True)


def test_what_cannot_move_bytes_is_named(exported: Exported) -> None:
    direct = exported("direct")
    ((state, found),) = pair("direct", direct, moved("direct", direct))
    assert (state, found) == (
        "failed",
        "decode-0 from prefill-0: both use direct, which does not leave its host",
    )
    assert [check.code for check in checks("direct", direct, b"", "nixl")] == ["PEER_TRANSPORT"]
    ((state, found),) = pair("direct", direct, b"", "nixl")
    assert (state, found) == (
        "failed",
        "decode-0 from prefill-0: one uses nixl and the other direct: nothing moves between them",
    )
    both = read_both(moved("auto", exported("auto", engine="nixl")))
    other = write_both(
        "w", msgspec.structs.replace(both, engine="mooncake", no_engine="mooncake is not installed")
    )
    ((state, found),) = pair("auto", exported("auto", engine="nixl"), other)
    assert (state, "one has no transfer engine behind it: mooncake is not installed" in found) == (
        "failed",
        True,
    )


def test_two_protocols_of_mooncake_do_not_meet() -> None:
    def metadata(protocol: str) -> bytes:
        return pack(Envelope("mooncake", "0.3.13", "w", (), msgspec.json.encode({"protocol": protocol})))

    assert unpack(metadata("tcp"), backend="mooncake").agent == "w"
    ((state, found),) = pair("mooncake", metadata("tcp"), metadata("rdma"))
    assert (state, found) == (
        "failed",
        "decode-0 from prefill-0: mooncake uses rdma on one side, tcp on the other",
    )


def test_what_cannot_be_read_is_said_to_be_unknown() -> None:
    ((state, found),) = pair("auto", b"junk", b"junk")
    assert state == "ok"
    assert "auto, over what is not known: metadata of 4 bytes begins with" in found


def test_pairs_that_move_bytes_alike_are_one_check_and_others_are_none() -> None:
    here = [row(f"decode-{n}", "decode", "nixl", b"") for n in range(3)]
    there = [row("prefill-0", "prefill", "nixl", b"")]
    (check,) = transport_checks(here, there, "10.0.0.8:7766")
    assert check.found.startswith(
        "decode-0 from prefill-0, decode-1 from prefill-0, decode-2 from prefill-0: nixl"
    )
    (none,) = transport_checks(here, here, "10.0.0.8:7766")
    assert (none.state, none.found) == (
        "skipped",
        "no engine here reads from one at 10.0.0.8:7766, and none there from one here",
    )
    blind = msgspec.structs.replace(there[0], card=None)
    (dark,) = transport_checks(here, [blind], "10.0.0.8:7766")
    assert (dark.state, dark.found) == (
        "skipped",
        "kvd shows no card of prefill-0, so what moves their bytes is not known",
    )


def test_the_workers_of_an_engine_that_told_the_same_count_once() -> None:
    made = engine_row("prefill-0", "prefill", 4)
    (told,) = told_by(made)
    assert (told.backend, told.memory) == ("nixl", "host")
    assert way([told], [told]).trouble == ""
