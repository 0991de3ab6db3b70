"""A geometry comes from another process: whatever stands in it, finding that out takes no time to speak of."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvd.geometry.check import (
    MAX_AXES,
    MAX_FIELDS,
    MAX_FIELDS_IN_ALL,
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_NAME,
    MAX_REGIONS,
)
from kvd.geometry.codec import MAX_DOCUMENT, decode_worker, encode_worker, worker_to_plain
from kvd.geometry.errors import BadGeometry
from tests.support.samples import engine, llama

Plain = dict[str, Any]
SECONDS = 0.5
"""Far more than any takes; the quadratic ones took eight."""


def sample(layers: int = 2) -> Plain:
    names = tuple(f"model.layers.{number}.self_attn.attn" for number in range(layers))
    plain: Plain = json.loads(
        json.dumps(worker_to_plain(engine("e", ("full", 16, None, llama(names))).workers[0]))
    )
    return plain


def axes(plain: Plain, count: int) -> None:
    field = plain["pages"][0]["fields"][0]
    field["axes"] = [[f"a{number}", 0, 1, 1, 1] for number in range(count)]
    field["shape"] = [[f"a{number}", 1] for number in range(count)]


def fields(plain: Plain, count: int) -> None:
    field = plain["pages"][0]["fields"][0]
    plain["pages"][0]["fields"] = [field | {"name": f"f{number}"} for number in range(count)]


def pages(plain: Plain, count: int) -> None:
    page = plain["pages"][0]
    page["fields"] = [page["fields"][0] | {"name": f"f{number}"} for number in range(MAX_FIELDS)]
    row = plain["groups"][0]["layers"][0]
    plain["pages"] = [page] * count
    plain["groups"][0]["layers"] = [[f"l{number}", number, *row[2:]] for number in range(count)]


def layers(plain: Plain, count: int) -> None:
    row = plain["groups"][0]["layers"][0]
    plain["groups"][0]["layers"] = [[f"l{number}", *row[1:]] for number in range(count)]


def regions(plain: Plain, count: int) -> None:
    plain["regions"] += [plain["regions"][0]] * (count - len(plain["regions"]))


def groups(plain: Plain, count: int) -> None:
    plain["groups"] += [plain["groups"][0] | {"layers": []}] * (count - 1)


def read(plain: Plain) -> None:
    """Decode; what is refused is refused at once."""
    began = time.process_time()
    try:
        decode_worker(json.dumps(plain, separators=(",", ":")).encode())
    finally:
        assert time.process_time() - began < SECONDS


def told(plain: Plain) -> str:
    """Why a geometry is refused; empty where it is taken."""
    try:
        read(plain)
    except BadGeometry as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("many", "most", "what"),
    [
        (axes, MAX_AXES, "axes of a field"),
        (fields, MAX_FIELDS, "fields of a page"),
        (layers, MAX_LAYERS, "layers"),
        (regions, MAX_REGIONS, "regions"),
        (groups, MAX_GROUPS, "groups"),
        (pages, MAX_FIELDS_IN_ALL // MAX_FIELDS, "fields of all pages"),
    ],
)
def test_more_than_any_model_has_is_refused(many: Callable[[Plain, int], None], most: int, what: str) -> None:
    plain = sample()
    many(plain, most + 1)
    with pytest.raises(BadGeometry, match=rf"^\d+ {what}; at most \d+ are taken$"):
        read(plain)
    plain = sample()
    many(plain, most)
    assert "at most" not in told(plain)  # two fields of a page at one place are refused for another reason


def test_a_deep_model_is_far_below_the_limits() -> None:
    worker = engine(
        "e", ("full", 16, None, llama(tuple(f"model.layers.{n}.self_attn.attn" for n in range(400))))
    ).workers[0]
    data = encode_worker(worker)
    assert len(data) < MAX_DOCUMENT / 10
    assert decode_worker(data) == worker


def test_tens_of_thousands_of_axes_cost_nothing() -> None:
    plain = sample()
    axes(plain, 20_000)
    with pytest.raises(BadGeometry, match="20000 axes"):
        read(plain)


@pytest.mark.parametrize(
    "data", [b"[" * MAX_DOCUMENT, b"[" + b"[]," * 300_000 + b"[]]", b'{"x":[' + b"{}," * 300_000 + b"{}]}"]
)
def test_what_is_no_document_is_not_built(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(BadGeometry):
        decode_worker(data)
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain["regions"][0].__setitem__(1, 1 << 64),
        lambda plain: plain["regions"][0].__setitem__(0, (1 << 64) - 1),
        lambda plain: plain["groups"][0].update(block_size=1 << 70),
        lambda plain: plain["groups"][0]["layers"][0].__setitem__(0, "n" * (MAX_NAME + 1)),
        lambda plain: plain["regions"][0].__setitem__(2, "d" * (MAX_NAME + 1)),
        lambda plain: plain["pages"][0]["fields"][0].update(dtype="t" * (MAX_NAME + 1)),
        lambda plain: plain["pages"][0]["fields"][0]["axes"][0].__setitem__(0, "a" * (MAX_NAME + 1)),
        lambda plain: plain["pages"][0]["fields"][0]["shape"][0].__setitem__(1, 1 << 64),
    ],
)
def test_numbers_and_names_have_limits(change: Callable[[Plain], None]) -> None:
    plain = sample()
    change(plain)
    with pytest.raises(BadGeometry) as found:
        read(plain)
    assert len(found.value.message) < 2000


def test_another_format_is_told_as_such() -> None:
    with pytest.raises(BadGeometry, match="geometry format 2; this version reads 1"):
        decode_worker(b'{"format": 2, "pages": {}}')
    with pytest.raises(BadGeometry, match="geometry format 2; this version reads 1"):
        decode_worker(json.dumps(sample() | {"format": 2}).encode())
