"""Geometries of workers that are alike: what they share is cut out, sent once and read once.

A worker's document is cut in two. Its *head* holds the rank, the number of blocks and the regions, its *tail* the pages
and the groups. Workers of one engine have few tails between them: one for each place among the heads of the model. The
head and the tail in a row are the document, byte for byte, however it was made.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from itertools import starmap
from typing import NamedTuple, TypeVar

import msgspec

from kvd.geometry.check import check_placed
from kvd.geometry.codec import MAX_DOCUMENT, decode_worker, encode_worker, shape_of
from kvd.geometry.content import content_of
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import Group, Region, WorkerGeometry
from kvd.geometry.rank import Rank

T = TypeVar("T")

CUT = b',"pages":'
KEPT = 256
"""Most kinds of worker, and most tails, that one `AlikeReader` remembers. Real engines have at most as
many as heads."""
KEPT_DIGESTS = 16_384
"""Most kinds of documents that a `DocumentChecker` remembers, 2 MB: those used last, one for each engine and place."""


class _HeadDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a document says before its pages."""

    format: int
    rank: tuple[int, int, int]
    num_blocks: int
    regions: tuple[tuple[int, int, str], ...]


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
    lengths: tuple[int, ...]
    devices: tuple[str, ...]
    tail: bytes


_OF_NONE = _SameButPlace(0, 0, (), (), b"")


def cut(document: bytes) -> tuple[bytes, bytes]:
    """The head and the tail of a worker's document; of another form it is all head, and the tail is empty."""
    at = document.find(CUT)
    return (document[:at], document[at:]) if at > 0 else (document, b"")


def kind_of(document: bytes) -> tuple[bytes, bytes] | None:
    """The head with rank 0 and every address 0, and the tail: workers of one kind have the same two.

    None for a document of another form. Such a one may say a thing twice, so its head may not be what counts.
    """
    head, tail = cut(document)
    parsed = _parsed(head, tail)
    if parsed is None or _parse(_TAIL, b"{" + tail[1:]) is None:
        return None
    regions = tuple([(0, length, device) for _, length, device in parsed.regions])
    return msgspec.json.encode(msgspec.structs.replace(parsed, rank=(0, 0, 0), regions=regions))[:-1], tail


class AlikeReader:
    """Reads documents of workers, those that are alike at the cost of one. For one engine, or a few.

    Workers with one tail share one tuple of groups, however many blocks they have.
    """

    def __init__(self) -> None:
        self._read: OrderedDict[_SameButPlace, tuple[Group, ...]] = OrderedDict()
        self._digests: dict[_SameButPlace, bytes] = {}
        self._tails: OrderedDict[tuple[int, bytes], tuple[Group, ...]] = OrderedDict()

    def learn(self, worker: WorkerGeometry) -> None:
        """Those that are like this one, which was checked, need not be read."""
        head, tail = cut(encode_worker(worker))
        if (parsed := _parsed(head, tail)) is not None:
            self._remember(_alike(parsed, tail), worker.groups)

    def read_document(self, document: bytes) -> tuple[WorkerGeometry, str]:
        """`read` of a whole document."""
        return self.read(*cut(document))

    def read(self, head: bytes, tail: bytes) -> tuple[WorkerGeometry, str]:
        """`worker` and its shape, a digest of all but the addresses. Raises as that."""
        worker, parsed, alike = self._worker(head, tail)
        digest = self._digests.get(alike)
        if parsed is None or (digest is None and alike not in self._read):
            return worker, shape_of(head + tail)
        if digest is None:
            digest = self._digests[alike] = _digest(alike)
        return worker, _shape(digest, parsed)

    def worker(self, head: bytes, tail: bytes) -> WorkerGeometry:
        """A worker's geometry. Raises `BadGeometry` (or another `GeometryError`) as `decode_worker` does."""
        return self._worker(head, tail)[0]

    def _worker(self, head: bytes, tail: bytes) -> tuple[WorkerGeometry, _HeadDocument | None, _SameButPlace]:
        parsed = _parsed(head, tail)
        if parsed is None:
            return decode_worker(head + tail), None, _OF_NONE
        alike = _alike(parsed, tail)
        if (groups := self._read.get(alike)) is not None:
            return WorkerGeometry(_rank(parsed), parsed.num_blocks, _regions(parsed), groups), parsed, alike
        if (groups := self._tails.get((parsed.format, tail))) is not None:
            worker = WorkerGeometry(_rank(parsed), parsed.num_blocks, _regions(parsed), groups)
            check_placed(worker)
        else:
            worker = decode_worker(head + tail)
            if _parse(_TAIL, b"{" + tail[1:]) is None:
                return worker, parsed, alike
        self._remember(alike, worker.groups)
        return worker, parsed, alike

    def _remember(self, alike: _SameButPlace, groups: tuple[Group, ...]) -> None:
        self._read[alike] = self._tails[alike.format, alike.tail] = groups
        if len(self._read) > KEPT:
            self._digests.pop(self._read.popitem(last=False)[0], None)
        if len(self._tails) > KEPT:
            self._tails.popitem(last=False)


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
        parsed = _parsed(head, tail)
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
        return CheckedDocument(_rank(parsed), _regions(parsed), _shape(digest, parsed), self._good[digest])


class PlacedShape(NamedTuple):
    """A worker's rank, and its shape: a digest of all of its document but the addresses."""

    rank: Rank
    shape: str


class ShapeReader:
    """Finds shapes of the workers of one engine, each kind at the cost of a digest."""

    def __init__(self) -> None:
        self._digests: dict[_SameButPlace, bytes] = {}

    def read(self, head: bytes, tail: bytes) -> PlacedShape | None:
        """What an `AlikeReader` would find; pages and groups are not read, so they may be bad.

        None for a document of another form, which only a reader understands. Raises `BadGeometry` for a rank or an
        address that cannot be.
        """
        parsed = _parsed(head, tail)
        if parsed is None:
            return None
        alike = _alike(parsed, tail)
        if (digest := self._digests.get(alike)) is None:
            if _parse(_TAIL, b"{" + tail[1:]) is None:
                return None
            digest = self._digests[alike] = _digest(alike)
        return PlacedShape(_rank(parsed), _shape(digest, parsed))


def _alike(head: _HeadDocument, tail: bytes) -> _SameButPlace:
    lengths, devices = tuple([row[1] for row in head.regions]), tuple([row[2] for row in head.regions])
    return _SameButPlace(head.format, head.num_blocks, lengths, devices, tail)


def _digest(alike: _SameButPlace) -> bytes:
    head = alike.format, alike.num_blocks, tuple(zip(alike.lengths, alike.devices, strict=True))
    return hashlib.blake2b(repr(head).encode() + alike.tail, digest_size=16).digest()


def _rank(head: _HeadDocument) -> Rank:
    """The rank that a head says. Raises `BadGeometry` for a rank below zero and a region outside of 64 bits."""
    if min(head.rank) < 0 or min([row[0] for row in head.regions], default=0) < 0:
        raise BadGeometry(f"a worker of rank {head.rank} has a negative rank or address")
    if (end := max([row[0] + row[1] for row in head.regions], default=0)) > 1 << 64:
        raise BadGeometry(f"a worker of rank {head.rank} has a region that ends at {end:#x}, beyond 64 bits")
    tp, pp, dcp = head.rank
    return Rank(tp=tp, pp=pp, dcp=dcp)


def _regions(head: _HeadDocument) -> tuple[Region, ...]:
    return tuple(starmap(Region, head.regions))


def _shape(digest: bytes, head: _HeadDocument) -> str:
    return hashlib.blake2b(digest + repr(head.rank).encode(), digest_size=16).hexdigest()


def _parsed(head: bytes, tail: bytes) -> _HeadDocument | None:
    """The head; None where it is of another form, has no tail, or where the two are longer than is read."""
    return _parse(_HEAD, head + b"}") if tail and len(head) + len(tail) <= MAX_DOCUMENT else None


def _parse(decoder: msgspec.json.Decoder[T], text: bytes) -> T | None:
    """None where the text is of another form: whoever reads head and tail as one will say what is wrong."""
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
