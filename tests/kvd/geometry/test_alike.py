"""Workers that are alike are read at the cost of one, and to the same as each by itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.geometry.alike import CUT, AlikeReader, DocumentChecker, ShapeReader, cut, kind_of
from kvd.geometry.codec import decode_worker, encode_worker, shape_of
from kvd.geometry.content import content_of
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from tests.support import random_engines as engines
from tests.support.samples import engine, llama


@st.composite
def drawn(draw: st.DrawFn) -> EngineGeometry:
    return engines.engine(draw, "e", draw(engines.models()), 4)


@settings(max_examples=50, deadline=None)
@given(drawn())
def test_each_worker_reads_as_it_does_by_itself(made: EngineGeometry) -> None:
    reader = AlikeReader()
    shapes: dict[str, str] = {}
    for worker in made.workers:
        document = encode_worker(worker)
        assert b"".join(cut(document)) == document
        read, shape = reader.read_document(document)
        assert read == worker == decode_worker(document)
        assert ShapeReader().read(*cut(document)) == (read.rank, shape)
        assert shapes.setdefault(shape_of(document), shape) == shape
    assert len(set(shapes.values())) == len(shapes)


@settings(max_examples=30, deadline=None)
@given(drawn())
def test_a_checker_says_what_a_reader_does_and_keeps_digests_alone(made: EngineGeometry) -> None:
    reader, checker = AlikeReader(), DocumentChecker()
    for worker in (*made.workers, *made.workers):
        document = encode_worker(worker)
        read, shape = reader.read_document(document)
        assert checker.check(document) == (read.rank, read.regions, shape, content_of(read.groups))
    assert all(len(digest) == 16 for digest in checker._good)


def test_a_checker_keeps_the_kinds_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.geometry.alike.KEPT_DIGESTS", 2)
    documents = [
        encode_worker(engine("e", ("full", size, None, llama(("a",)))).workers[0]) for size in (16, 32, 64)
    ]
    checker, decoded = DocumentChecker(), list[bytes]()

    def decode(document: bytes) -> WorkerGeometry:
        decoded.append(document)
        return decode_worker(document)

    monkeypatch.setattr("kvd.geometry.alike.decode_worker", decode)
    for number in (0, 1, 0, 2, 0, 1):
        checker.check(documents[number])
    assert [documents.index(one) for one in decoded] == [0, 1, 2, 1]


def test_a_checker_refuses_what_is_below_zero_also_where_it_knows_the_rest() -> None:
    document = encode_worker(engine("e", ("full", 16, None, llama(("a",)))).workers[0])
    checker = DocumentChecker()
    checker.check(document)
    with pytest.raises(BadGeometry, match="negative"):
        checker.check(document.replace(b'"rank":[0', b'"rank":[-1'))


def test_workers_that_are_alike_share_their_groups() -> None:
    made = engine("e", ("full", 16, None, llama(("a", "b"), heads=1)), tp=2)
    reader = AlikeReader()
    one, other = (reader.read_document(encode_worker(worker))[0] for worker in made.workers)
    assert one.groups is other.groups
    assert (one.rank, other.rank) == (made.workers[0].rank, made.workers[1].rank)


@pytest.mark.parametrize(
    "tail",
    [
        CUT + b'[],"groups":[],"rank":[9,0,0]}',
        CUT + b"[]}",
        CUT + b"[",
        b"",
    ],
)
def test_a_tail_cannot_speak_over_a_head(tail: bytes) -> None:
    head, good = cut(encode_worker(engine("e", ("full", 16, None, llama(("a",)))).workers[0]))
    reader = AlikeReader()
    reader.read(head, good)
    alone: object
    try:
        alone = decode_worker(head + tail)
    except BadGeometry as error:
        alone = str(error)
    found: object
    try:
        found = reader.read(head, tail)[0]
        found = reader.read(head, tail)[0]
    except BadGeometry as error:
        found = str(error)
    assert found == alone
    assert ShapeReader().read(head, tail) is None


def test_a_document_of_another_form_is_read_as_a_whole() -> None:
    worker = engine("e", ("full", 16, None, llama(("a",)))).workers[0]
    other = json.dumps(json.loads(encode_worker(worker)), indent=1, sort_keys=True).encode()
    assert cut(other) == (other, b"")
    assert ShapeReader().read(*cut(other)) is None
    assert AlikeReader().read_document(other) == (worker, shape_of(other))


@pytest.mark.parametrize("before", [b"-", b"1" + 19 * b"0"], ids=["below zero", "beyond 64 bits"])
def test_an_address_that_cannot_be_is_refused_of_the_second_as_of_the_first(before: bytes) -> None:
    document = encode_worker(engine("e", ("full", 16, None, llama(("a",)))).workers[0])
    reader = AlikeReader()
    reader.read_document(document)
    spoilt = document.replace(b'"regions":[[', b'"regions":[[' + before, 1)
    with pytest.raises(BadGeometry):
        reader.read_document(spoilt)
    with pytest.raises(BadGeometry):
        ShapeReader().read(*cut(spoilt))


GOOD = encode_worker(engine("e", ("full", 16, None, llama(("a",)))).workers[0])
REGIONS = b'"regions":[[%d,%d,"cpu"]]' % (1 << 32, 1 << 26)


@pytest.mark.parametrize(
    ("regions", "good"),
    [
        (REGIONS, True),
        (REGIONS.replace(b'"cpu"', b'"cuda:0"'), True),
        (REGIONS.replace(b',"cpu"', b""), False),
        (REGIONS.replace(b'"cpu"', b'"cpu",1'), False),
        (REGIONS.replace(b'"cpu"', b'"%s"' % (b"x" * 600)), False),
        (b'"regions":[]', False),
        (REGIONS + b" " * (1 << 20), False),
        (b'"regions":[],' + REGIONS, True),
        (REGIONS + b',"regions":[]', False),
    ],
)
def test_what_is_like_a_known_one_is_taken_where_it_would_be_by_itself(regions: bytes, good: bool) -> None:
    assert REGIONS in GOOD
    document = GOOD.replace(REGIONS, regions)
    reader, checker, known = AlikeReader(), DocumentChecker(), AlikeReader()
    reader.read_document(GOOD)
    checker.check(GOOD)
    known.learn(decode_worker(GOOD))
    if good:
        one = decode_worker(document)
        assert reader.read_document(document)[0] == known.read_document(document)[0] == one
        assert checker.check(document).regions == one.regions
        return
    for read in (decode_worker, reader.read_document, known.read_document, checker.check):
        with pytest.raises(BadGeometry):
            read(document)


def test_a_kind_has_neither_rank_nor_address_and_is_of_documents_of_one_form_alone() -> None:
    made = engine("e", ("full", 16, None, llama(("a", "b"), heads=1)), tp=2)
    first, second = map(encode_worker, made.workers)
    found = kind_of(second)
    assert found is not None
    assert found == kind_of(first)
    assert {region.address for region in decode_worker(b"".join(found)).regions} == {0}
    for odd in (
        first.replace(CUT, b", " + CUT[1:]),
        first[:-1] + b',"regions":[[1,4,"cpu"]]}',
        first[:-1] + b',"rank":[0,0,0]}',
        first.replace(b'{"format":1,', b'{"format":1,"made_by":"x",'),
        b"",
    ):
        assert kind_of(odd) is None
