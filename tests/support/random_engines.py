"""Random pairs of engines for hypothesis: every kind of layer, any parallelism, layouts that share nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from hypothesis import strategies as st

from kvd.geometry.check import check_worker
from kvd.geometry.model import (
    Axis,
    EngineGeometry,
    Field,
    Group,
    GroupKind,
    Layer,
    Page,
    Region,
    WorkerGeometry,
)
from kvd.geometry.rank import Rank
from kvd.geometry.shards import (
    ContextShare,
    ConvSection,
    Placement,
    Share,
    conv_fields,
    kv_fields,
    latent_field,
    share,
    state_field,
    token_axes,
)

Draw = st.DrawFn


@dataclass(frozen=True)
class Attention:
    """Keys and values; ``scaled`` adds a scale for every head of every token."""

    heads: int
    key: int
    value: int
    itemsize: int
    scaled: bool


@dataclass(frozen=True)
class Latent:
    size: int
    itemsize: int


@dataclass(frozen=True)
class State:
    """Convolution sections as (name, things that are sharded, width of one) and a recurrent state."""

    sections: tuple[tuple[str, int, int], ...]
    heads: int
    inner: tuple[int, ...]
    taps: int
    channels_first: bool


Tensor = Attention | Latent | State


@dataclass(frozen=True)
class Kind:
    """Some layers of a model that are alike."""

    group: GroupKind
    tensor: Tensor
    layers: tuple[str, ...]
    window: int | None


@dataclass(frozen=True)
class Sizes:
    tp: int
    dcp: int
    interleave: int
    pp: int


@dataclass(frozen=True)
class Shape:
    """What one engine decides for one group: kernel blocks in a page, local tokens in each, and the byte layout."""

    kernel_blocks: int
    kernel_tokens: int
    order: str
    values: str
    gap: int


def models() -> st.SearchStrategy[tuple[Kind, ...]]:
    return st.composite(_model)()


def _model(draw: Draw) -> tuple[Kind, ...]:
    kinds: list[Kind] = []
    for i in range(draw(st.integers(1, 3))):
        family = draw(st.sampled_from(("gqa", "gqa", "mla", "mamba1", "mamba2", "gdn")))
        layers = tuple(f"l{i}.{n}" for n in range(draw(st.integers(1, 3))))
        group: GroupKind = "mamba"
        window = None
        if family in ("gqa", "mla"):
            group = "mla" if family == "mla" else draw(st.sampled_from(("full", "sliding_window", "chunked")))
            window = draw(st.integers(1, 24)) if group in ("sliding_window", "chunked") else None
        kinds.append(Kind(group, _tensor(draw, family), layers, window))
    return tuple(kinds)


def _tensor(draw: Draw, family: str) -> Tensor:
    if family == "gqa":
        key = draw(st.sampled_from((1, 2, 3, 4)))
        same = draw(st.booleans())
        return Attention(
            heads=draw(st.sampled_from((1, 2, 3, 4, 6, 8))),
            key=key,
            value=key if same else draw(st.integers(1, 4)),
            itemsize=draw(st.sampled_from((1, 2, 4))),
            scaled=draw(st.booleans()),
        )
    if family == "mla":
        return Latent(draw(st.integers(1, 9)), draw(st.sampled_from((1, 2))))
    heads, width, state = (
        draw(st.sampled_from((2, 4, 6, 8))),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    taps, first = draw(st.integers(1, 3)), draw(st.booleans())
    if family == "mamba1":
        return State((("x", heads, 1),), heads, (state,), taps, channels_first=True)
    if family == "mamba2":
        groups = draw(st.sampled_from((1, 2, heads)))
        sections = (("x", heads, width), ("B", groups, state), ("C", groups, state))
        return State(sections, heads, (width, state), taps, first)
    keys = heads // 2
    return State(
        (("q", keys, state), ("k", keys, state), ("v", heads, width)), heads, (width, state), taps, first
    )


def _counts(tensor: Tensor) -> list[int]:
    """How many things of each sort a tensor is sharded over."""
    match tensor:
        case Attention():
            return [tensor.heads]
        case State():
            return [tensor.heads, *(count for _, count, _ in tensor.sections)]
        case Latent():
            return []


def sizes(draw: Draw, model: Sequence[Kind], *, by_tp: bool = False) -> Sizes:
    counts = [c for kind in model for c in _counts(kind.tensor)]
    tp = draw(
        st.sampled_from([t for t in (1, 2, 3, 4, 6, 8, 12) if all(t % c == 0 or c % t == 0 for c in counts)])
    )
    if by_tp:
        return Sizes(tp, 1, 1, 1)
    heads = [k.tensor.heads for k in model if isinstance(k.tensor, Attention)]
    spare = [tp // h if tp % h == 0 else 1 for h in heads] or [tp]
    dcp = draw(st.sampled_from([d for d in (1, 2, 3, 4) if tp % d == 0 and all(s % d == 0 for s in spare)]))
    layers = sum(len(k.layers) for k in model)
    return Sizes(tp, dcp, draw(st.integers(1, 2)), draw(st.integers(1, min(3, layers))) if tp < 6 else 1)


def shapes(draw: Draw, size: Sizes) -> Shape:
    run = size.interleave if size.dcp > 1 else 1
    return Shape(
        kernel_blocks=draw(st.sampled_from((1, 1, 2, 3))),
        kernel_tokens=run * draw(st.integers(1, 4)),
        order=draw(st.sampled_from(("HN", "NH", "outer heads"))),
        values=draw(st.sampled_from(("joined", "apart", "far"))),
        gap=draw(st.sampled_from((0, 0, 4, 7))),
    )


def engine(
    draw: Draw, name: str, model: Sequence[Kind], blocks: int, *, by_tp: bool = False
) -> EngineGeometry:
    """An engine that serves ``model`` with ``blocks`` blocks on each worker; ``by_tp``: it is tensor-parallel alone."""
    size = sizes(draw, model, by_tp=by_tp)
    kinds = list(draw(st.permutations(model)))
    if draw(st.booleans()) and len(kinds[0].layers) > 1:
        # One engine may keep in two groups what the other keeps in one.
        kinds[0:1] = [
            replace(kinds[0], layers=kinds[0].layers[:1]),
            replace(kinds[0], layers=kinds[0].layers[1:]),
        ]
    chosen = [shapes(draw, size) for _ in kinds]
    stages = _stages(draw, [layer for kind in kinds for layer in kind.layers], size.pp)
    arrangement = draw(st.sampled_from(("regions", "layers", "blocks", "overlaid layers", "overlaid blocks")))
    base = draw(st.integers(0, 3))
    workers = []
    for pp, names in enumerate(stages):
        for tp in range(size.tp):
            rank = Rank(tp=tp, pp=pp, dcp=tp % size.dcp)
            parts = [
                (kind, shape, _block_size(kind, shape, size), [n for n in kind.layers if n in names])
                for kind, shape in zip(kinds, chosen, strict=True)
            ]
            workers.append(_worker(rank, size, parts, arrangement, base, blocks))
    order = (
        draw(st.permutations(range(len(workers)))) if len(workers) < 5 and not by_tp else range(len(workers))
    )
    return EngineGeometry(
        engine_id=name,
        generation=f"{name}-1",
        model="random",
        tp=size.tp,
        pp=size.pp,
        dcp=size.dcp,
        workers=tuple(workers[i] for i in order),
    )


def _stages(draw: Draw, layers: list[str], pp: int) -> list[set[str]]:
    cuts = (
        [*sorted(draw(st.sets(st.integers(1, len(layers) - 1), min_size=pp - 1, max_size=pp - 1)))]
        if pp > 1
        else []
    )
    return [set(layers[a:b]) for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]


def _block_size(kind: Kind, shape: Shape, size: Sizes) -> int:
    dcp = 1 if isinstance(kind.tensor, State) else size.dcp
    return shape.kernel_blocks * shape.kernel_tokens * dcp


Part = tuple[Kind, Shape, int, list[str]]


def _worker(
    rank: Rank, size: Sizes, parts: Sequence[Part], arrangement: str, base: int, blocks: int
) -> WorkerGeometry:
    """Put the pages of all groups into memory: a region a layer, layer by layer, block by block, or overlaid."""
    pages = [_page(kind.tensor, shape, rank, size, blocks) for kind, shape, _, _ in parts]
    spans = [
        max(page.size, 1) + shape.gap * (arrangement != "regions")
        for page, (_, shape, _, _) in zip(pages, parts, strict=True)
    ]
    far = any(_far(kind.tensor, shape) for kind, shape, _, _ in parts)
    regions: list[Region] = []
    groups: list[Group] = []
    together = arrangement.startswith("overlaid") and not far
    slots = max(len(names) for *_, names in parts)
    widest = max(spans)

    def region(length: int) -> int:
        regions.append(Region(4096 * base + (1 << 24) * len(regions) + 64, length, "cpu"))
        return len(regions) - 1

    shared = region(slots * widest * blocks) if together else 0
    for index, ((kind, shape, block_size, names), page, span) in enumerate(
        zip(parts, pages, spans, strict=True)
    ):
        layers = []
        width = widest if together else span
        count = slots if together else len(names)
        own = 0
        apart = far or arrangement == "regions"
        if names and not together and not apart:
            own = region(count * width * blocks)
        for n, name in enumerate(names):
            if apart:
                stride = _stride(kind.tensor, shape, page, rank, size)
                layers.append(
                    Layer(name, page, region(shape.gap + blocks * stride + page.size), shape.gap, stride)
                )
            elif arrangement.endswith("layers"):
                layers.append(Layer(name, page, shared if together else own, n * width * blocks, width))
            else:
                layers.append(Layer(name, page, shared if together else own, n * width, count * width))
        groups.append(Group(index, kind.group, block_size, tuple(layers), kind.window))
    worker = WorkerGeometry(rank, blocks, tuple(regions), tuple(groups))
    check_worker(worker)
    return worker


def _far(tensor: Tensor, shape: Shape) -> bool:
    """Whether values stand after the keys of all blocks; scales have their place only in a page of its own."""
    return isinstance(tensor, Attention) and shape.values == "far" and not tensor.scaled


def _stride(tensor: Tensor, shape: Shape, page: Page, rank: Rank, size: Sizes) -> int:
    """Bytes between blocks of a layer that has a region of its own; K and V far apart have the stride of K alone."""
    if not (isinstance(tensor, Attention) and _far(tensor, shape)):
        return page.size + shape.gap
    heads = share("heads", tensor.heads, rank.tp, size.tp).extent
    return shape.kernel_blocks * shape.kernel_tokens * heads * max(tensor.key, tensor.value) * tensor.itemsize


def _page(tensor: Tensor, shape: Shape, rank: Rank, size: Sizes, blocks: int) -> Page:
    match tensor:
        case Attention():
            fields = _attention(tensor, shape, rank, size, blocks)
        case Latent():
            row = tensor.size * tensor.itemsize
            fields = (
                latent_field(
                    dtype="x",
                    itemsize=tensor.itemsize,
                    tokens=token_axes(
                        kernel_blocks=shape.kernel_blocks,
                        kernel_tokens=shape.kernel_tokens,
                        kernel_stride=row * shape.kernel_tokens,
                        token_stride=row,
                        context=ContextShare(rank.dcp, size.dcp, size.interleave),
                    ),
                    block_tokens=shape.kernel_blocks * shape.kernel_tokens * size.dcp,
                    size=tensor.size,
                    dim_stride=tensor.itemsize,
                ),
            )
        case State():
            fields = _state(tensor, rank, size)
    return Page(max(f.end for f in fields), fields)


def _attention(tensor: Attention, shape: Shape, rank: Rank, size: Sizes, blocks: int) -> tuple[Field, ...]:
    heads = share("heads", tensor.heads, rank.tp, size.tp)
    kb, kt, item = shape.kernel_blocks, shape.kernel_tokens, tensor.itemsize
    wide = tensor.key + tensor.value if shape.values == "joined" else max(tensor.key, tensor.value)
    row = wide * item
    head, token, kernel = {
        "HN": (row * kt, row, row * kt * heads.extent),
        "NH": (row, row * heads.extent, row * kt * heads.extent),
        "outer heads": (row * kt * kb, row, row * kt),
    }[shape.order]
    plane = row * heads.extent * kt * kb
    offset = {"joined": tensor.key * item, "apart": plane, "far": plane}[shape.values]
    if _far(tensor, shape):
        offset = plane * blocks + shape.gap
    elif shape.values != "joined" and shape.order != "outer heads":
        offset, kernel = kernel, 2 * kernel
    context = ContextShare(rank.dcp, size.dcp, size.interleave)
    tokens = token_axes(
        kernel_blocks=kb, kernel_tokens=kt, kernel_stride=kernel, token_stride=token, context=context
    )
    covers = kb * kt * size.dcp
    fields = kv_fields(
        dtype="x",
        itemsize=item,
        heads=heads,
        tokens=tokens,
        block_tokens=covers,
        key_size=tensor.key,
        value_size=tensor.value,
        place=Placement(head, item, 0, offset),
    )
    if not tensor.scaled:
        return fields
    return (*fields, _scales(heads, shape, context, 2 * plane, covers))


def _scales(heads: Share, shape: Shape, context: ContextShare, offset: int, covers: int) -> Field:
    """A float32 for every token and head, after keys and values."""
    tokens = token_axes(
        kernel_blocks=shape.kernel_blocks,
        kernel_tokens=shape.kernel_tokens,
        kernel_stride=4 * shape.kernel_tokens,
        token_stride=4,
        context=context,
    )
    stride = 4 * shape.kernel_tokens * shape.kernel_blocks
    return Field(
        name="k.scale",
        dtype="float32",
        itemsize=4,
        offset=offset,
        axes=(Axis("head", heads.start, heads.extent, 1, stride), *tokens),
        shape=(("head", heads.total), ("token", covers)),
    )


def _state(tensor: State, rank: Rank, size: Sizes) -> tuple[Field, ...]:
    sections = []
    for name, count, width in tensor.sections:
        part = share(name, count, rank.tp, size.tp)
        sections.append(ConvSection(name, Share(part.start * width, part.extent * width, part.total * width)))
    conv = conv_fields(
        dtype="x",
        itemsize=2,
        sections=sections,
        taps=tensor.taps,
        channels_first=tensor.channels_first,
    )
    width = sum(s.channels.extent for s in sections)
    ssm = state_field(
        dtype="x",
        itemsize=4,
        offset=2 * width * tensor.taps,
        heads=share("state heads", tensor.heads, rank.tp, size.tp),
        inner=tensor.inner,
    )
    assert ssm.nbytes == 4 * prod(tensor.inner) * max(1, tensor.heads // size.tp)
    return (*conv, ssm)
