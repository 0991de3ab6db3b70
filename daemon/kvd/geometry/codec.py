"""Geometry as text: the form that crosses the wire and stands in geometry files.

One JSON document a worker, with each distinct page written once. Decoding checks everything, since the bytes come from
another process or host.
"""

from __future__ import annotations

import hashlib
from typing import Any, get_args

import msgspec

from kvd.geometry.check import check_worker
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import Group, GroupKind, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank

FORMAT = 1
KINDS: dict[str, GroupKind] = {kind: kind for kind in get_args(GroupKind)}
MAX_DOCUMENT = 1024 * 1024
"""Bytes. A worker of 200 layers takes about 30 KB; this is enough for `MAX_LAYERS` of them."""


class _LayerRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A layer; ``page`` is the number of its page among the document's."""

    name: str
    page: int
    region: int
    offset: int
    stride: int


class _GroupDocument(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    block_size: int
    window: int | None = None
    scratch_blocks: int = 0
    layers: tuple[_LayerRow, ...]


class _Document(msgspec.Struct, frozen=True):
    format: int
    rank: tuple[int, int, int]
    num_blocks: int
    regions: tuple[tuple[int, int, str], ...]
    pages: tuple[Page, ...]
    groups: tuple[_GroupDocument, ...]


class _Format(msgspec.Struct, frozen=True):
    """The format of a document, as far as it is one that a later version might have."""

    format: int | None = None


_DOCUMENT = msgspec.json.Decoder(_Document)
_FORMAT = msgspec.json.Decoder(_Format)


def encode_worker(worker: WorkerGeometry) -> bytes:
    """The worker's geometry as UTF-8 JSON."""
    return msgspec.json.encode(_document(worker))


def decode_worker(data: bytes) -> WorkerGeometry:
    """The geometry in ``data``. Raises `BadGeometry` (or another `GeometryError`) that says what is wrong with it."""
    if len(data) > MAX_DOCUMENT:
        raise BadGeometry(f"a geometry of {len(data)} bytes; at most {MAX_DOCUMENT} are taken")
    # Into the types at once: what is none of them is not built.
    try:
        document = _DOCUMENT.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _of_another_format(data) or BadGeometry(f"not a geometry: {error}") from None
    if document.format != FORMAT:
        raise BadGeometry(f"geometry format {document.format!r}; this version reads {FORMAT}")
    return _worker(document)


def shape_of(data: bytes) -> str:
    """A digest of all but the addresses of a geometry that was found good: a worker's next start has the same."""
    document = _DOCUMENT.decode(data)
    elsewhere = msgspec.structs.replace(document, regions=tuple((0, *row[1:]) for row in document.regions))
    return hashlib.blake2b(msgspec.json.encode(elsewhere), digest_size=16).hexdigest()


def worker_to_plain(worker: WorkerGeometry) -> dict[str, Any]:
    """The geometry as dicts, lists, numbers and strings."""
    plain: dict[str, Any] = msgspec.to_builtins(_document(worker))
    return plain


def worker_from_plain(plain: object) -> WorkerGeometry:
    """The inverse of `worker_to_plain`, checked by `check_worker`."""
    if isinstance(plain, dict) and plain.get("format") != FORMAT:
        raise BadGeometry(f"geometry format {plain.get('format')!r}; this version reads {FORMAT}")
    try:
        document = msgspec.convert(plain, _Document)
    except msgspec.ValidationError as error:
        raise BadGeometry(f"not a geometry: {error}") from None
    return _worker(document)


def _of_another_format(data: bytes) -> BadGeometry | None:
    """Why a document cannot be read that says it is of another format; None where it does not."""
    try:
        found = _FORMAT.decode(data).format
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if found == FORMAT:
        return None
    return BadGeometry(f"geometry format {found!r}; this version reads {FORMAT}")


def _worker(document: _Document) -> WorkerGeometry:
    tp, pp, dcp = document.rank
    worker = WorkerGeometry(
        rank=Rank(tp=tp, pp=pp, dcp=dcp),
        num_blocks=document.num_blocks,
        regions=tuple(Region(*row) for row in document.regions),
        groups=tuple(_group(i, group, document.pages) for i, group in enumerate(document.groups)),
    )
    check_worker(worker)
    return worker


def _document(worker: WorkerGeometry) -> _Document:
    pages = list(dict.fromkeys(layer.page for group in worker.groups for layer in group.layers))
    number = {page: i for i, page in enumerate(pages)}
    return _Document(
        format=FORMAT,
        rank=(worker.rank.tp, worker.rank.pp, worker.rank.dcp),
        num_blocks=worker.num_blocks,
        regions=tuple((r.address, r.length, r.device) for r in worker.regions),
        pages=tuple(pages),
        groups=tuple(
            _GroupDocument(
                kind=g.kind,
                block_size=g.block_size,
                window=g.window,
                scratch_blocks=g.scratch_blocks,
                layers=tuple(
                    _LayerRow(x.name, number[x.page], x.region, x.offset, x.stride) for x in g.layers
                ),
            )
            for g in worker.groups
        ),
    )


def _group(index: int, group: _GroupDocument, pages: tuple[Page, ...]) -> Group:
    if group.kind not in KINDS:
        raise BadGeometry(f"group {index} is of kind {group.kind!r}; known are {', '.join(KINDS)}")
    layers = []
    for row in group.layers:
        if not 0 <= row.page < len(pages):
            raise BadGeometry(f"layer {row.name} names page {row.page} of {len(pages)}")
        layers.append(Layer(row.name, pages[row.page], row.region, row.offset, row.stride))
    return Group(
        index, KINDS[group.kind], group.block_size, tuple(layers), group.window, group.scratch_blocks
    )
