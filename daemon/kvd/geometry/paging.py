"""How vLLM 0.32 cuts a model's caches into pages and groups: block sizes of hybrids, padding, layers to groups.

The rules are those of `Platform._align_hybrid_block_size` (vllm/platforms/interface.py) and of
`_get_kv_cache_groups_uniform_page_size` (vllm/v1/core/kv_cache_utils.py), restated for layers that have one page size
each. Sizes are in bytes and of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.geometry.errors import UnknownShape

MLA_BLOCK = 128
"""Tokens: vLLM makes the blocks of hybrids with MLA a multiple of this."""


@dataclass(frozen=True, slots=True)
class Paged:
    """One layer's cache: attention of ``token_bytes`` a token, or a state of ``state_bytes``.

    Layers with equal ``kind`` (anything hashable) may share a group.
    """

    name: str
    kind: object
    token_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers that share a block table; ``block_size`` in local tokens (0 for a state), ``page`` with its padding."""

    kind: object
    layers: tuple[str, ...]
    block_size: int
    page: int


def hybrid_block_size(
    *, block_size: int, kernel_block: int, token_bytes: int, state_bytes: int, latent: bool = False
) -> int:
    """Tokens in a block of a hybrid: the least multiple of the block size whose attention page holds a state."""
    step = max(kernel_block, block_size, MLA_BLOCK if latent else 1)
    grown = step * -(-state_bytes // (step * token_bytes))
    grown = kernel_block * -(-grown // kernel_block)
    return max(block_size, grown)


def page_groups(layers: Sequence[Paged], block_size: int) -> tuple[PagedGroup, ...]:
    """Layers to groups, all of one page size.

    A layer with smaller pages gets more tokens a block where that makes pages equal, else (states, and attention that
    does not divide) padding. Kinds are split into groups of as many layers as the rarest kind has. Where the commonest
    kind has less than half as many again, they have as many layers as that one. Layer ``i`` of a kind goes to its group
    ``i`` modulo their number, so that pipeline stages hold a share of each.
    """
    kinds: dict[object, list[Paged]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    page = max(_page(layer, block_size) for layer in layers)
    counts = [len(found) for found in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    made = []
    for kind, found in kinds.items():
        if len({(layer.token_bytes, layer.state_bytes) for layer in found}) != 1:
            raise UnknownShape(f"layers of {kind} differ in page size: {found[0].name} and others")
        tokens = _tokens(found[0], block_size, page)
        count = -(-len(found) // size)
        made += [PagedGroup(kind, tuple(x.name for x in found[i::count]), tokens, page) for i in range(count)]
    return tuple(made)


def stages(depth: int, pp: int, partition: Sequence[int] | None = None) -> tuple[range, ...]:
    """Decoder layers of each pipeline stage; ``partition`` gives their numbers (``VLLM_PP_LAYER_PARTITION``).

    Without one the layers that are left over go to the last stages but the very last, as in `get_pp_indices`.
    """
    counts = list(partition) if partition is not None else [depth // pp] * pp
    if partition is None:
        for i in range(2, depth % pp + 2):
            counts[-i] += 1
    if len(counts) != pp or sum(counts) != depth or min(counts) < 1:
        raise UnknownShape(f"{depth} layers cannot stand on {pp} pipeline stages as {counts}")
    firsts = [sum(counts[:i]) for i in range(pp)]
    return tuple(range(first, first + count) for first, count in zip(firsts, counts, strict=True))


def _page(layer: Paged, block_size: int) -> int:
    return layer.state_bytes or layer.token_bytes * block_size


def _tokens(layer: Paged, block_size: int, page: int) -> int:
    if layer.state_bytes:
        return 0
    own = layer.token_bytes * block_size
    return block_size * (page // own) if page % own == 0 else block_size
