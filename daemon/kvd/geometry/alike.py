"""Geometries of workers that are alike: what they share is cut out, sent once and read once.

A worker's document is cut in two. Its *head* holds the rank, the number of blocks and the regions, its *tail* the pages
and the groups. Workers of one engine have few tails between them: one for each place among the heads of the model. The
head and the tail in a row are the document, byte for byte, however it was made.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple, TypeVar

import msgspec

from kvd.geometry.codec import decode_worker, shape_of
from kvd.geometry.content import content_of
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import Group, Region, WorkerGeometry
from kvd.geometry.rank import Rank

T = TypeVar("T")

CUT = b',"pages":'
KEPT = 256
"""Most tails whose groups are remembered by one `AlikeReader`. Real engines have at most as many as heads."""
KEPT_DIGESTS = 16_384
"""Most kinds of documents that a `DocumentChecker` remembers, 2 MB: those used last, one for each engine and place."""


class _HeadDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a document says before its pages."""

    format: int
    rank: tuple[int, int, int]
    num_blocks: int
    regions: tuple[Region, ...]


class _TailDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left: nothing that would speak over the head."""

    pages: msgspec.Raw
    groups: msgspec.Raw


_HEAD = msgspec.json.Decoder(_HeadDocument)
_TAIL = msgspec.json.Decoder(_TailDocument)


class _SameButPlace(NamedTuple):
    """What decides whether two heads may share the groups of one tail: nothing but rank and addresses differs."""

    format: int
    num_blocks: int
    regions: tuple[tuple[int, str], ...]
    tail: bytes


class _TailRead(NamedTuple):
    """The groups of a tail, found good, and the digest that all its workers' shapes begin with."""

    groups: tuple[Group, ...]
    digest: bytes


def cut(document: bytes) -> tuple[bytes, bytes]:
    """The head and the tail of a worker's document; of another form it is all head, and the tail is empty."""
    at = document.find(CUT)
    return (document[:at], document[at:]) if at > 0 else (document, b"")


def placeless(head: bytes) -> bytes:
    """The head with rank 0 and every address 0: workers of one kind have one. Raises `BadGeometry`."""
    parsed = _parse(_HEAD, head + b"}")
    if parsed is None:
        raise BadGeometry(f"not the head of a geometry: {head[:80]!r}")
    regions = tuple(Region(0, region.length, region.device) for region in parsed.regions)
    return msgspec.json.encode(msgspec.structs.replace(parsed, rank=(0, 0, 0), regions=regions))[:-1]


class AlikeReader:
    """Reads documents of workers, those that are alike at the cost of one. For one engine, or a few."""

    def __init__(self) -> None:
        self._read: OrderedDict[_SameButPlace, _TailRead] = OrderedDict()

    def read_document(self, document: bytes) -> tuple[WorkerGeometry, str]:
        """`read` of a whole document."""
        return self.read(*cut(document))

    def read(self, head: bytes, tail: bytes) -> tuple[WorkerGeometry, str]:
        """A worker's geometry and its shape, a digest of all but the addresses.

        Raises `BadGeometry` (or another `GeometryError`) as `decode_worker` does.
        """
        parsed = _parse(_HEAD, head + b"}") if tail else None
        if parsed is None:
            return decode_worker(head + tail), shape_of(head + tail)
        alike = _alike(parsed, tail)
        known = self._read.get(alike)
        if known is None:
            worker = decode_worker(head + tail)
            if _parse(_TAIL, b"{" + tail[1:]) is None:
                return worker, shape_of(head + tail)
            known = self._read[alike] = _TailRead(worker.groups, _digest(alike))
            if len(self._read) > KEPT:
                self._read.popitem(last=False)
        else:
            worker = WorkerGeometry(_rank(parsed), parsed.num_blocks, parsed.regions, known.groups)
        return worker, _shape(known.digest, parsed)


class CheckedDocument(NamedTuple):
    """What kvd needs of a geometry that was found good."""

    rank: Rank
    regions: tuple[Region, ...]
    shape: str
    content: int
    """What its layers hold (`kvd.geometry.content`)."""


class DocumentChecker:
    """Checks documents of workers, those that are alike at the cost of one, and keeps a digest of each kind alone."""

    def __init__(self) -> None:
        self._good: OrderedDict[bytes, int] = OrderedDict()
        """What the layers hold of those that were found good."""

    def check(self, document: bytes) -> CheckedDocument:
        """What stands in it. Raises `BadGeometry` (or another `GeometryError`) as `decode_worker` does."""
        head, tail = cut(document)
        parsed = _parse(_HEAD, head + b"}") if tail else None
        digest = _digest(_alike(parsed, tail)) if parsed is not None else b""
        if parsed is None or digest not in self._good:
            worker = decode_worker(document)
            if parsed is None or _parse(_TAIL, b"{" + tail[1:]) is None:
                content = content_of(worker.groups)
                return CheckedDocument(worker.rank, worker.regions, shape_of(document), content)
            self._good[digest] = content_of(worker.groups)
            if len(self._good) > KEPT_DIGESTS:
                self._good.popitem(last=False)
        self._good.move_to_end(digest)
        return CheckedDocument(_rank(parsed), parsed.regions, _shape(digest, parsed), self._good[digest])


class PlacedShape(NamedTuple):
    """A worker's rank, and its shape: a digest of all of its document but the addresses."""

    rank: Rank
    shape: str


def read_shape(head: bytes, tail: bytes) -> PlacedShape | None:
    """What a reader would find, at the cost of a digest: pages and groups are not read, so they may be bad.

    None for a document of another form, which only a reader understands. Raises `BadGeometry` for a rank or an address
    that cannot be.
    """
    parsed = _parse(_HEAD, head + b"}") if tail else None
    if parsed is None or _parse(_TAIL, b"{" + tail[1:]) is None:
        return None
    return PlacedShape(_rank(parsed), _shape(_digest(_alike(parsed, tail)), parsed))


def _alike(head: _HeadDocument, tail: bytes) -> _SameButPlace:
    regions = tuple((r.length, r.device) for r in head.regions)
    return _SameButPlace(head.format, head.num_blocks, regions, tail)


def _digest(alike: _SameButPlace) -> bytes:
    return hashlib.blake2b(repr(alike[:3]).encode() + alike.tail, digest_size=16).digest()


def _rank(head: _HeadDocument) -> Rank:
    """The rank that a head says. Raises `BadGeometry` for a rank below zero and a region outside of 64 bits."""
    if min(head.rank) < 0 or min((r.address for r in head.regions), default=0) < 0:
        raise BadGeometry(f"a worker of rank {head.rank} has a negative rank or address")
    if (end := max((r.address + r.length for r in head.regions), default=0)) > 1 << 64:
        raise BadGeometry(f"a worker of rank {head.rank} has a region that ends at {end:#x}, beyond 64 bits")
    tp, pp, dcp = head.rank
    return Rank(tp=tp, pp=pp, dcp=dcp)


def _shape(digest: bytes, head: _HeadDocument) -> str:
    return hashlib.blake2b(digest + repr(head.rank).encode(), digest_size=16).hexdigest()


def _parse(decoder: msgspec.json.Decoder[T], text: bytes) -> T | None:
    """None where the text is of another form: whoever reads head and tail as one will say what is wrong."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
