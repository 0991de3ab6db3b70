"""Geometry as text: everything survives the way there and back, and what is not a geometry is told so."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.geometry.codec import MAX_DOCUMENT, decode_worker, encode_worker, shape_of, worker_to_plain
from kvd.geometry.errors import BadGeometry, GeometryError
from kvd.geometry.model import WorkerGeometry
from tests.support import random_engines as engines
from tests.support.raising import raises
from tests.support.samples import engine, llama


@st.composite
def geometries(draw: st.DrawFn) -> WorkerGeometry:
    return engines.engine(draw, "e", draw(engines.models()), 4).workers[-1]


def sample() -> dict[str, Any]:
    worker = engine("e", ("full", 16, None, llama(("a", "b")))).workers[0]
    plain: dict[str, Any] = json.loads(json.dumps(worker_to_plain(worker)))
    return plain


@settings(max_examples=100, deadline=None)
@given(geometries())
def test_a_worker_survives(worker: WorkerGeometry) -> None:
    assert decode_worker(encode_worker(worker)) == worker


def test_the_shape_knows_no_address_and_all_else() -> None:
    def shape(change: Any) -> str:
        plain = sample()
        change(plain)
        return shape_of(json.dumps(plain).encode())

    def moved(plain: dict[str, Any]) -> None:
        plain["regions"] = [[address + 4096, *rest] for address, *rest in plain["regions"]]

    same = shape(lambda _: None)
    assert shape(moved) == same
    others = {
        shape(lambda plain: plain.update(rank=[1, 0, 0])),
        shape(lambda plain: plain.update(num_blocks=3)),
        shape(lambda plain: plain["regions"][0].__setitem__(1, 1 << 30)),
        shape(lambda plain: plain["regions"][0].__setitem__(2, "cuda:0")),
        shape(lambda plain: plain["groups"][0].update(block_size=32)),
        shape(lambda plain: plain["pages"][0]["fields"][0].update(offset=1)),
    }
    assert len(others - {same}) == 6


def test_what_this_version_does_not_know_is_passed_over() -> None:
    data = encode_worker(engine("e", ("full", 16, None, llama(("a",)))).workers[0])
    newer = data[:-1] + b',"later":["\xd2",{}]}'
    assert decode_worker(newer) == decode_worker(data)
    assert shape_of(newer) == shape_of(data)


def test_alike_layers_are_written_once() -> None:
    worker = engine("e", ("full", 16, None, llama(tuple(f"layers.{i}" for i in range(80))))).workers[0]
    assert len(worker_to_plain(worker)["pages"]) == 1
    assert len(encode_worker(worker)) < 10_000


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[]", b"null", b"{}", b"1" * 100, b"[" * 100_000, b" " * (MAX_DOCUMENT + 1)]
)
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(BadGeometry):
        decode_worker(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_document_is_refused_or_a_geometry(data: st.DataObject) -> None:
    """Replace one value anywhere: nothing but a `GeometryError` may come of it."""
    plain = sample()
    place: Any = plain
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(
            st.one_of(
                st.none(),
                st.integers(-(2**70), 2**70),
                st.text(max_size=3),
                st.just([]),
                st.just({}),
                st.booleans(),
            )
        )
        break
    with suppress(GeometryError):
        decode_worker(json.dumps(plain).encode())


def change(path: tuple[Any, ...], value: Any) -> bytes:
    plain = sample()
    place: Any = plain
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), 2, "format 2"),
        (("num_blocks",), 0, "at least one block"),
        (("num_blocks",), True, "bool"),
        (("rank",), [0, -1, 0], "rank"),
        (("regions", 0, 1), 4096, "4096"),
        (("regions", 0, 0), -1, "-1"),
        (("regions", 0), [0, 1 << 30], "length 3"),
        (
            ("groups", 0, "kind"),
            "odd",
            "group 0 is of kind 'odd'; known are full, sliding_window, chunked, mla, mamba",
        ),
        (("groups", 0, "block_size"), 0, "block size 0"),
        (("groups", 0, "window"), 0, "window 0"),
        (("groups", 0, "layers", 0, 1), 7, "page 7 of 1"),
        (("groups", 0, "layers", 0, 2), 9, "region 9 of 2"),
        (("groups", 0, "layers", 0, 3), -4, "-4"),
        (("groups", 0, "layers", 1, 0), "a", "a layer twice"),
        (("pages", 0, "fields", 1, "name"), "k", "one name"),
        (("pages", 0, "fields"), [], "without fields"),
        (("pages", 0, "fields", 0, "axes", 0, 4), 0, "two elements at one place"),
        (("pages", 0, "fields", 0, "axes", 0, 1), 1, "head 8 of 8"),
        (("pages", 0, "fields", 0, "shape", 0, 0), "tail", "tail"),
    ],
)
def test_contradictions_are_named(path: tuple[Any, ...], value: Any, words: str) -> None:
    with raises("KVD-GEOMETRY-BAD", match=words):
        decode_worker(change(path, value))


def test_a_layer_in_two_groups_names_both() -> None:
    plain = sample()
    plain["groups"].append(plain["groups"][0])
    with raises("KVD-GEOMETRY-LAYER-IN-TWO-GROUPS", match="group 0 and in group 1"):
        decode_worker(json.dumps(plain).encode())


def test_a_claim_that_would_fill_memory_is_refused() -> None:
    plain = sample()
    axes = plain["pages"][0]["fields"][0]["axes"]
    axes[0][2:] = [1 << 40, 1, 8192]
    plain["pages"][0]["fields"][0]["shape"][0][1] = 1 << 40
    plain["regions"] = [[0, 1 << 60, "cpu"]] * 2
    with pytest.raises(BadGeometry, match="elements"):
        decode_worker(json.dumps(plain).encode())
