"""NixlConnector's handshake metadata, of vLLM 0.26 to 0.33.

The payload is a map of two: a hash that both sides must agree on, and the packed metadata of one worker. That is a map
too, whose fields say which generation wrote it: the number of the connector's version is only in the hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvctl.stock.bounded import StockGarbage

StockText = Annotated[str, Meta(max_length=512)]
StockWhole = Annotated[int, Meta(ge=0)]
Wholes = Annotated[list[StockWhole], Meta(max_length=65536)]
Names = Annotated[list[StockText], Meta(max_length=65536)]


class Payload(Struct, frozen=True):
    """What the listener sends."""

    compatibility_hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    agent_metadata_bytes: bytes


class NixlMetadata(Struct, frozen=True, kw_only=True):
    """One worker, as far as its generation tells; what it does not tell is None.

    ``block_size`` is in tokens of a kernel's block, of which ``physical_blocks_per_logical_kv_block`` are one block of
    vLLM's. ``block_lens`` and ``block_strides`` are in bytes, one a region.
    """

    engine_id: StockText
    agent_metadata: bytes
    kv_caches_base_addr: Wholes
    device_id: int
    num_blocks: Annotated[int, Meta(ge=1)]
    block_lens: Wholes
    kv_cache_layout: StockText
    block_size: Annotated[int, Meta(ge=1)]
    ssm_sizes: tuple[StockWhole, StockWhole]
    attn_backend_name: StockText
    physical_blocks_per_logical_kv_block: Annotated[int, Meta(ge=1)]
    dcp_size: Annotated[int, Meta(ge=1)] | None = None
    pcp_size: Annotated[int, Meta(ge=1)] | None = None
    block_strides: Wholes | None = None
    region_num_blocks: Wholes | None = None
    region_group_ids: Annotated[list[int], Meta(max_length=65536)] | None = None
    region_names: Names | None = None
    region_mem_types: Names | None = None
    region_members: Annotated[list[Names], Meta(max_length=65536)] | None = None
    packed_member_layouts: dict[str, tuple[StockWhole, StockWhole]] | None = None
    ple_block_len: StockWhole | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Versions of the connector whose metadata has the same fields, and the versions of vLLM that are known to be."""

    first: int
    last: int
    adds: tuple[str, ...]
    vllm: str = ""

    @property
    def shown(self) -> str:
        """``14-15 (vLLM 0.32, 0.33)``."""
        numbers = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{numbers} (vLLM {self.vllm})" if self.vllm else numbers


GENERATIONS = (
    Generation(14, 15, ("ple_block_len",), "0.32, 0.33"),
    Generation(13, 13, ("packed_member_layouts",)),
    Generation(12, 12, ("region_members",)),
    Generation(11, 11, ("region_mem_types",)),
    Generation(9, 10, ("block_strides",)),
    Generation(8, 8, ("dcp_size", "pcp_size")),
    Generation(3, 7, (), "0.26"),
)
"""The newest first. A worker is of the first whose added fields it has, and must have those of all older ones."""


@dataclass(frozen=True, slots=True)
class StockWorker:
    """One worker's answer: what it told, of which generation, and fields of it that this kvctl does not know."""

    compatibility_hash: str
    generation: Generation
    metadata: NixlMetadata
    unread: tuple[str, ...] = ()

    @property
    def incarnation(self) -> str:
        """Another one with each start of the engine: its agents and addresses are new."""
        told = self.metadata
        seen = hashlib.blake2b(told.agent_metadata, digest_size=8)
        seen.update(repr((told.engine_id, told.kv_caches_base_addr)).encode())
        return seen.hexdigest()


def decode(payload: bytes, where: str) -> StockWorker:
    """The worker of an answer from ``where``. Raises `StockGarbage` that says which field is wrong."""
    try:
        outer = msgspec.msgpack.decode(payload, type=Payload)
        inner: Any = msgspec.msgpack.decode(outer.agent_metadata_bytes)
        if not isinstance(inner, dict) or not all(isinstance(name, str) for name in inner):
            raise msgspec.ValidationError(f"metadata is a {type(inner).__name__} and no map of fields")
        told = msgspec.convert(inner, NixlMetadata, strict=True)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StockGarbage(
            f"{where} answers, but not with metadata of NixlConnector of vLLM 0.26 to 0.33: {error}",
            "which vLLM serves there? This kvctl reads generations 3 to 15 of the connector",
        ) from None
    generation = next(g for g in GENERATIONS if all(name in inner for name in g.adds))
    older = (name for g in GENERATIONS if g.first <= generation.first for name in g.adds)
    missing = [name for name in older if name not in inner]
    if missing:
        raise StockGarbage(
            f"{where} sends metadata of generation {generation.shown} without {', '.join(missing)}",
            "a build of vLLM that was patched? kvctl cannot tell what its figures mean",
        )
    _consistent(told, where)
    unread = inner.keys() - set(NixlMetadata.__struct_fields__)
    return StockWorker(outer.compatibility_hash, generation, told, tuple(sorted(unread)))


def _consistent(told: NixlMetadata, where: str) -> None:
    """Lists that go by region must be as long as there are regions. Raises `StockGarbage`."""
    regions = len(told.block_lens)
    for name in (
        "kv_caches_base_addr", "block_strides", "region_num_blocks", "region_group_ids", "region_names",
        "region_mem_types",
    ):  # fmt: skip
        listed = getattr(told, name)
        if listed is not None and len(listed) != regions:
            raise StockGarbage(f"{where} tells {regions} lengths of blocks and {len(listed)} of {name}")
    if not regions:
        raise StockGarbage(f"{where} tells of no region of KV memory")
