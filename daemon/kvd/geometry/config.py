"""The geometry of an engine that need not run: from a model's shape, parallel sizes and cache options.

Memory is laid out as vLLM 0.32 does it: one buffer a worker, layer ``l`` of block ``b`` at
``l * layer stride + b * block stride``, groups over the same bytes. Addresses are made up.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.geometry.check import check_worker
from kvd.geometry.errors import UnevenShard, UnknownShape
from kvd.geometry.families import AttentionShape, LatentShape, ModelShape, RecurrentShape
from kvd.geometry.live import BlockAxes, LiveTensor, Packing, cpu_attention_layer
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
from kvd.geometry.paging import Paged, PagedGroup, hybrid_block_size, page_groups, stages
from kvd.geometry.rank import Rank
from kvd.geometry.shards import ContextShare, Placement, kv_fields, latent_field, share, token_axes
from kvd.geometry.states import StateShape, state_fields

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1}
CACHE_TYPES = {"fp8": "float8_e4m3", "fp8_e4m3": "float8_e4m3", "fp8_e5m2": "float8_e5m2"}
LAYOUTS = {"NHD": "LBNHC", "HND": "LBHNC"}
"""vLLM's old names of its layouts."""

KNOWN_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
BASE = 1 << 40
"""Address of the first worker's buffer; each worker has its own tebibyte, so that no two overlap."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of an engine; ``partition`` gives the layers of each pipeline stage where they are not split evenly."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    partition: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What an engine's command line decides about its cache; defaults are those of vLLM 0.32 on a GPU.

    ``block_size`` and ``kernel_block`` (the least that the attention kernel takes) are in local tokens. ``layout`` is
    vLLM's name. ``align`` tells that states are kept at block boundaries (prefix caching). ``channels_first`` is
    ``VLLM_SSM_CONV_STATE_LAYOUT=DS``. ``packing`` is how vLLM's CPU attention arranges a block, None on a GPU. A CPU's
    block size is 128, its kernel block 32 and its layout LBHNC.
    """

    block_size: int = 16
    kernel_block: int = 16
    cache_dtype: str = "auto"
    dtype: str | None = None
    state_dtype: str | None = None
    layout: str = "LBNHC"
    num_blocks: int = 1024
    speculative_tokens: int = 0
    max_tokens: int | None = None
    align: bool = False
    channels_first: bool = False
    one_group: bool = False
    packing: Packing | None = None


def engine_from_shape(
    model: ModelShape, parallel: Parallel, options: CacheOptions, *, engine_id: str
) -> EngineGeometry:
    """The engine that serves a model of this shape.

    Raises `UnknownShape` where an option is not understood, `UnevenShard` where the model cannot be split over so many
    ranks.
    """
    if parallel.tp < 1 or parallel.pp < 1 or parallel.dcp < 1 or parallel.tp % parallel.dcp:
        raise UnevenShard(f"dcp {parallel.dcp} must divide tp {parallel.tp}, and all sizes be at least 1")
    plan = _Paging(model, parallel, options)
    groups = plan.groups()
    alike: dict[object, tuple[Group, ...]] = {}
    workers = [
        _worker(plan, groups, alike, Rank(tp=tp, pp=pp, dcp=tp % parallel.dcp), stage)
        for pp, stage in enumerate(stages(model.depth, parallel.pp, parallel.partition))
        for tp in range(parallel.tp)
    ]
    return EngineGeometry(
        engine_id=engine_id,
        generation="config",
        model=model.name,
        tp=parallel.tp,
        pp=parallel.pp,
        dcp=parallel.dcp,
        workers=tuple(workers),
        facts=_facts(plan),
    )


@dataclass(frozen=True, slots=True)
class _Paging:
    """A model on its ranks: item types, and the fields of each layer's page."""

    model: ModelShape
    parallel: Parallel
    options: CacheOptions

    @property
    def dtype(self) -> str:
        return self.options.dtype or self.model.dtype

    @property
    def cache_type(self) -> str:
        given = self.options.cache_dtype
        return self.dtype if given == "auto" else CACHE_TYPES.get(given, given)

    @property
    def layout(self) -> str:
        found = LAYOUTS.get(self.options.layout, self.options.layout)
        if found not in KNOWN_LAYOUTS:
            raise UnknownShape(f"layout {found} is not one of {', '.join(KNOWN_LAYOUTS)}")
        return found

    def groups(self) -> tuple[PagedGroup, ...]:
        """The groups of the whole model, pipeline stages together."""
        layers = [self._paged(name, shape) for name, shape in self.shapes.items()]
        full = {x.kind for x in layers if isinstance(x.kind, AttentionShape) and x.kind.kind == "full"}
        if len(full) > 1:
            raise UnknownShape(f"full attention layers of several shapes: {', '.join(map(str, full))}")
        block = self.options.block_size
        if self.model.hybrid:
            block = hybrid_block_size(
                block_size=block,
                kernel_block=self.options.kernel_block,
                token_bytes=max(x.token_bytes for x in layers),
                state_bytes=max(x.state_bytes for x in layers),
                latent=any(isinstance(s, LatentShape) for s in self.shapes.values()),
            )
        return page_groups(layers, block)

    @property
    def shapes(self) -> dict[str, AttentionShape | LatentShape | RecurrentShape]:
        return {layer.name: layer.shape for layer in self.model.layers}

    def _paged(self, name: str, shape: AttentionShape | LatentShape | RecurrentShape) -> Paged:
        if isinstance(shape, RecurrentShape):
            return Paged(name, shape, state_bytes=sum(f.nbytes for f in self.state(shape, 0)))
        if isinstance(shape, LatentShape):
            return Paged(name, shape, token_bytes=shape.size * item_size(self.cache_type))
        if self.options.one_group:
            # Without the hybrid manager windowed layers keep every token; their window only saves compute.
            shape = AttentionShape("full", shape.heads, shape.key_size, shape.value_size)
        heads = share("KV heads", shape.heads, 0, self.parallel.tp).extent
        return Paged(
            name, shape, token_bytes=heads * (shape.key_size + shape.value_size) * item_size(self.cache_type)
        )

    def state(self, shape: RecurrentShape, tp: int) -> tuple[Field, ...]:
        """The fields of a state page on one rank."""
        ranks = self.parallel.tp
        heads = share("state heads", shape.heads, tp, ranks).extent
        if shape.family != "mamba1" and shape.heads % ranks:
            raise UnevenShard(f"{shape.heads} state heads cannot be split over {ranks} ranks")
        if shape.family == "gdn" and shape.groups % ranks:
            raise UnevenShard(
                f"{shape.groups} key heads of Gated DeltaNet cannot be split over {ranks} ranks"
            )
        part = share("state groups", shape.groups, tp, ranks).extent * shape.state_size
        channels = heads * shape.head_size + (0 if shape.family == "mamba1" else 2 * part)
        taps = shape.kernel - 1 + self.options.speculative_tokens
        first = self.options.channels_first or shape.family == "mamba1"
        inner = (shape.state_size,) if shape.family == "mamba1" else (shape.head_size, shape.state_size)
        state_dtype = self.options.state_dtype or self.model.state_dtype
        if state_dtype == self.model.dtype:
            state_dtype = self.dtype
        live = StateShape(
            family=shape.family,
            conv=((channels, taps) if first else (taps, channels), self.dtype, item_size(self.dtype)),
            ssm=((heads, *inner), state_dtype, item_size(state_dtype)),
            heads=shape.heads,
            groups=shape.groups,
            channels_first=first,
        )
        return state_fields(live, tp, ranks)


def item_size(dtype: str) -> int:
    """Bytes of one element. Raises `UnknownShape` for a type that is not known."""
    if dtype not in ITEM_SIZES:
        raise UnknownShape(f"type {dtype} is not one of {', '.join(ITEM_SIZES)}")
    return ITEM_SIZES[dtype]


def _worker(
    plan: _Paging,
    groups: tuple[PagedGroup, ...],
    alike: dict[object, tuple[Group, ...]],
    rank: Rank,
    stage: range,
) -> WorkerGeometry:
    # One object for all groups of a kind: planning compares pages layer by layer, which costs nothing for the same.
    kinds = dict.fromkeys(group.kind for group in groups)
    pages = {kind: _page(plan, next(g for g in groups if g.kind == kind), rank) for kind in kinds}
    depth = {layer.name: layer.depth for layer in plan.model.layers}
    here = [[name for name in group.layers if depth[name] in stage] for group in groups]
    blocks, widest = plan.options.num_blocks, max(1, *(len(names) for names in here))
    page = groups[0].page
    number = rank.pp * plan.parallel.tp + rank.tp
    region = Region(BASE * (number + 1), page * blocks * widest)
    # And one for all workers with the same groups: planning looks at each kind of worker once, and so does the check.
    key = (stage, tuple(pages.values()))
    if key in alike:
        return WorkerGeometry(rank, blocks, (region,), alike[key])
    attention_block = max(group.block_size for group in groups)
    made = []
    for index, (group, names) in enumerate(zip(groups, here, strict=True)):
        together = plan.layout.startswith("B")
        layer_step, block_step = (page, page * widest) if together else (page * blocks, page)
        made.append(
            Group(
                index=index,
                kind=_kind(group.kind),
                block_size=_covers(plan, group, attention_block),
                layers=tuple(
                    Layer(name, pages[group.kind], 0, n * layer_step, block_step)
                    for n, name in enumerate(names)
                ),
                window=group.kind.window if isinstance(group.kind, AttentionShape) else None,
                scratch_blocks=plan.options.speculative_tokens
                if isinstance(group.kind, RecurrentShape)
                else 0,
            )
        )
    alike[key] = tuple(made)
    worker = WorkerGeometry(rank, blocks, (region,), alike[key])
    check_worker(worker)
    return worker


def _kind(shape: object) -> GroupKind:
    if isinstance(shape, AttentionShape):
        return shape.kind
    return "mla" if isinstance(shape, LatentShape) else "mamba"


def _covers(plan: _Paging, group: PagedGroup, attention_block: int) -> int:
    """Tokens of one block on the engine as a whole; of a state, those between two checkpoints."""
    if group.block_size:
        return group.block_size * plan.parallel.dcp
    if plan.options.align:
        return attention_block or plan.options.block_size
    return plan.options.max_tokens or plan.model.max_tokens


def _page(plan: _Paging, group: PagedGroup, rank: Rank) -> Page:
    shape = group.kind
    if isinstance(shape, RecurrentShape):
        fields = plan.state(shape, rank.tp)
        return Page(max(f.end for f in fields), fields)
    item = item_size(plan.cache_type)
    context = ContextShare(rank.dcp, plan.parallel.dcp, plan.parallel.interleave)
    covers = group.block_size * plan.parallel.dcp

    def tokens(stride: int) -> tuple[Axis, ...]:
        return token_axes(
            kernel_blocks=1,
            kernel_tokens=group.block_size,
            kernel_stride=0,
            token_stride=stride,
            context=context,
        )

    if isinstance(shape, LatentShape):
        latent = latent_field(
            dtype=plan.cache_type,
            itemsize=item,
            tokens=tokens(shape.size * item),
            block_tokens=covers,
            size=shape.size,
            dim_stride=item,
        )
        return Page(latent.end, (latent,))
    if not isinstance(shape, AttentionShape):
        raise UnknownShape(f"a layer of {shape!r}")
    heads = share("KV heads", shape.heads, rank.tp, plan.parallel.tp)
    row = (shape.key_size + shape.value_size) * item
    if plan.options.packing is not None:
        strides = (row * group.block_size * heads.extent, row * group.block_size, row, item)
        tensor = LiveTensor(
            layer=group.layers[0],
            address=0,
            shape=(1, heads.extent, group.block_size, shape.key_size + shape.value_size),
            strides=strides,
            dtype=plan.cache_type,
            itemsize=item,
        )
        return cpu_attention_layer(
            tensor,
            (Region(0, strides[0]),),
            blocks=BlockAxes(1, covers, context),
            heads=heads,
            key_size=shape.key_size,
            value_size=shape.value_size,
            packing=plan.options.packing,
        ).page
    by_head = plan.layout.endswith("HNC")
    head_step, token_step = (row * group.block_size, row) if by_head else (row, row * heads.extent)
    fields = kv_fields(
        dtype=plan.cache_type,
        itemsize=item,
        heads=heads,
        tokens=tokens(token_step),
        block_tokens=covers,
        key_size=shape.key_size,
        value_size=shape.value_size,
        place=Placement(head_step, item, 0, shape.key_size * item),
    )
    return Page(max(f.end for f in fields), fields)


def _facts(plan: _Paging) -> dict[str, str | int | float | bool | None]:
    attention = [s for s in plan.shapes.values() if isinstance(s, AttentionShape)]
    facts: dict[str, str | int | float | bool | None] = {
        "model": plan.model.name,
        "dtype": plan.dtype,
        "cache_dtype": plan.options.cache_dtype,
        "layers": len(plan.model.layers),
        "layout": plan.layout,
        "speculative_tokens": plan.options.speculative_tokens,
    }
    if attention:
        facts |= {"kv_heads": attention[0].heads, "head_size": attention[0].key_size}
    return facts
