"""Packed geometries: what was packed comes back, and nothing else costs more than a geometry may."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.geometry.check import MAX_LAYERS
from kvd.geometry.codec import MAX_DOCUMENT, encode_worker
from kvd.geometry.errors import BadGeometry
from kvd.geometry.packing import MOST_TIMES, pack, unpack
from tests.support import random_engines as engines
from tests.support.samples import engine, llama

MANY = tuple(f"model.layers.{number}.self_attn.attn" for number in range(MAX_LAYERS))


@st.composite
def documents(draw: st.DrawFn) -> list[bytes]:
    return [encode_worker(w) for w in engines.engine(draw, "e", draw(engines.models()), 4).workers]


@settings(max_examples=50, deadline=None)
@given(documents())
def test_a_document_comes_back_byte_for_byte(made: list[bytes]) -> None:
    for document in made:
        assert unpack(pack(document)) == document


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_and_any_changed_byte_are_a_document_or_bad(noise: bytes, at: int, byte: int) -> None:
    changed = bytearray(pack(encode_worker(engine("e", ("full", 16, None, llama(("a",)))).workers[0])))
    changed[at % len(changed)] = byte
    for data in (noise, bytes(changed)):
        try:
            found = unpack(data)
        except BadGeometry:
            continue
        assert len(found) <= MAX_DOCUMENT


@pytest.mark.parametrize("layers", [1, 80, MAX_LAYERS])
def test_all_layers_that_a_worker_may_have_are_taken(layers: int) -> None:
    sample = engine("e", ("full", 16, None, llama(("a",)))).workers[0]
    (group,) = sample.groups
    alike = tuple(dataclasses.replace(group.layers[0], name=name) for name in MANY[:layers])
    document = encode_worker(dataclasses.replace(sample, groups=(dataclasses.replace(group, layers=alike),)))
    assert unpack(pack(document)) == document
    assert len(document) / len(pack(document)) < MOST_TIMES / 2, "with room for what else may repeat"


def test_what_would_become_too_large_is_refused_before_it_does() -> None:
    bomb = zlib.compress(bytes(1 << 26), 9)
    with pytest.raises(BadGeometry, match=f"unpack to more than {MAX_DOCUMENT}, "):
        unpack(bomb)
    small = zlib.compress(bytes(MAX_DOCUMENT // 2), 9)
    with pytest.raises(BadGeometry, match=f"unpack to more than {MOST_TIMES * len(small)}, "):
        unpack(small)


def test_what_is_cut_off_or_longer_than_it_says_is_refused() -> None:
    packed = pack(b'{"format":1}')
    with pytest.raises(BadGeometry, match="does not end within its"):
        unpack(packed[:-1])
    with pytest.raises(BadGeometry, match=f"3 of {len(packed) + 3} bytes stand behind its end"):
        unpack(packed + b"abc")
    with pytest.raises(BadGeometry, match="not a packed geometry: Error -3"):
        unpack(b'{"format":1}')
