"""Geometry as text: the form that crosses the wire and stands in geometry files.

One JSON document a worker, with each distinct page written once. Decoding checks everything, since the bytes come from
another process or host.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from kvd.geometry.check import check_worker
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import Axis, Field, Group, GroupKind, Layer, Page, Region, WorkerGeometry
from kvd.geometry.rank import Rank

FORMAT = 1
KINDS: tuple[GroupKind, ...] = ("full", "sliding_window", "chunked", "mla", "mamba")
MAX_DOCUMENT = 16 * 1024 * 1024
"""Bytes; a worker of 200 layers takes about 30 KB."""

T = TypeVar("T")


def encode_worker(worker: WorkerGeometry) -> bytes:
    """The worker's geometry as UTF-8 JSON."""
    return json.dumps(worker_to_plain(worker), separators=(",", ":")).encode()


def decode_worker(data: bytes) -> WorkerGeometry:
    """The geometry in ``data``. Raises `BadGeometry` (or another `GeometryError`) that says what is wrong with it."""
    if len(data) > MAX_DOCUMENT:
        raise BadGeometry(f"a geometry of {len(data)} bytes; at most {MAX_DOCUMENT} are taken")
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadGeometry(f"not a geometry: {error}") from None
    return worker_from_plain(plain)


def shape_of(data: bytes) -> str:
    """A digest of all but the addresses of a geometry that was found good: a worker's next start has the same."""
    plain = json.loads(data)
    plain["regions"] = [row[1:] for row in plain["regions"]]
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()


def worker_to_plain(worker: WorkerGeometry) -> dict[str, Any]:
    """The geometry as dicts, lists, numbers and strings."""
    pages = list(dict.fromkeys(layer.page for group in worker.groups for layer in group.layers))
    number = {page: i for i, page in enumerate(pages)}
    return {
        "format": FORMAT,
        "rank": [worker.rank.tp, worker.rank.pp, worker.rank.dcp],
        "num_blocks": worker.num_blocks,
        "regions": [[r.address, r.length, r.device] for r in worker.regions],
        "pages": [{"size": page.size, "fields": [_field_to_plain(f) for f in page.fields]} for page in pages],
        "groups": [
            {
                "kind": g.kind,
                "block_size": g.block_size,
                "window": g.window,
                "scratch_blocks": g.scratch_blocks,
                "layers": [[x.name, number[x.page], x.region, x.offset, x.stride] for x in g.layers],
            }
            for g in worker.groups
        ],
    }


def worker_from_plain(plain: object) -> WorkerGeometry:
    """The inverse of `worker_to_plain`, checked by `check_worker`."""
    doc = _mapping(plain, "geometry")
    if doc.get("format") != FORMAT:
        raise BadGeometry(f"geometry format {doc.get('format')!r}; this version reads {FORMAT}")
    tp, pp, dcp = _row(doc.get("rank"), (int, int, int), "rank")
    pages = _each(doc.get("pages"), _page_from_plain, "pages")
    worker = WorkerGeometry(
        rank=Rank(tp=tp, pp=pp, dcp=dcp),
        num_blocks=_of(int, doc.get("num_blocks"), "num_blocks"),
        regions=_each(doc.get("regions"), lambda r: Region(*_row(r, (int, int, str), "region")), "regions"),
        groups=tuple(
            _group_from_plain(i, g, pages)
            for i, g in enumerate(_each(doc.get("groups"), lambda g: g, "groups"))
        ),
    )
    check_worker(worker)
    return worker


def _field_to_plain(fld: Field) -> dict[str, Any]:
    return {
        "name": fld.name,
        "dtype": fld.dtype,
        "itemsize": fld.itemsize,
        "offset": fld.offset,
        "axes": [[a.label, a.start, a.extent, a.step, a.stride] for a in fld.axes],
        "shape": [list(pair) for pair in fld.shape],
    }


def _field_from_plain(plain: object) -> Field:
    doc = _mapping(plain, "field")
    return Field(
        name=_of(str, doc.get("name"), "field name"),
        dtype=_of(str, doc.get("dtype"), "field dtype"),
        itemsize=_of(int, doc.get("itemsize"), "field itemsize"),
        offset=_of(int, doc.get("offset"), "field offset"),
        axes=_each(doc.get("axes"), lambda a: Axis(*_row(a, (str, int, int, int, int), "axis")), "axes"),
        shape=_each(
            doc.get("shape"), lambda s: cast("tuple[str, int]", _row(s, (str, int), "shape")), "shape"
        ),
    )


def _page_from_plain(plain: object) -> Page:
    doc = _mapping(plain, "page")
    return Page(
        size=_of(int, doc.get("size"), "page size"),
        fields=_each(doc.get("fields"), _field_from_plain, "fields"),
    )


def _group_from_plain(index: int, plain: object, pages: tuple[Page, ...]) -> Group:
    doc = _mapping(plain, f"group {index}")
    kind = doc.get("kind")
    if kind not in KINDS:
        raise BadGeometry(f"group {index} is of kind {kind!r}; known are {', '.join(KINDS)}")

    def layer(row: object) -> Layer:
        name, page, region, offset, stride = _row(row, (str, int, int, int, int), "layer")
        if not 0 <= page < len(pages):
            raise BadGeometry(f"layer {name} names page {page} of {len(pages)}")
        return Layer(name, pages[page], region, offset, stride)

    window = doc.get("window")
    return Group(
        index=index,
        kind=kind,
        block_size=_of(int, doc.get("block_size"), "block_size"),
        layers=_each(doc.get("layers"), layer, "layers"),
        window=None if window is None else _of(int, window, "window"),
        scratch_blocks=_of(int, doc.get("scratch_blocks", 0), "scratch_blocks"),
    )


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadGeometry(f"{what} must be a mapping, not {type(value).__name__}")
    return value


def _of(kind: type[T], value: object, what: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadGeometry(f"{what} must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _row(value: object, kinds: tuple[type, ...], what: str) -> tuple[Any, ...]:
    # Nearly all of a document is rows, and kvd reads those of every worker of every peer: one comparison for each.
    if type(value) is list and tuple(map(type, value)) == kinds:
        return tuple(value)
    if not isinstance(value, list) or len(value) != len(kinds):
        raise BadGeometry(f"{what} must be a list of {len(kinds)} values, not {str(value)[:80]}")
    return tuple(_of(kind, item, what) for kind, item in zip(kinds, value, strict=True))


def _each(value: object, make: Callable[[Any], T], what: str) -> tuple[T, ...]:
    if not isinstance(value, list):
        raise BadGeometry(f"{what} must be a list, not {type(value).__name__}")
    return tuple(make(item) for item in value)
