"""What a decoding worker is told of a prefill elsewhere, whoever told it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvd.topology.blocks import BlockList
from kvd.topology.columns import column_of

LONGEST_NAME = 512
"""Most characters of a transfer id and an engine id, as in kvd."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is told of a finished prefill.

    ``blocks[g]`` are the prefiller's block ids of group ``g``, the first of which covers block number
    ``first_blocks[g]`` of the request. ``tokens`` is for how many tokens they hold KV, ``digest`` is of those tokens
    (`kvd.vllm.prompt.digest`). ``lease_seconds`` counts from ``lease_opened`` (Unix seconds of the prefiller's clock).
    ``checksum``: checksums of the blocks can be asked for. ``seal`` binds all of this (`kvd.vllm.prompt.seal`).
    """

    engine_id: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    request_id: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    generation: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    host: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    port: int
    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    lease_seconds: float
    lease_opened: float
    checksum: bool = False
    digest: str = ""
    seal: str = ""

    def block_lists(self) -> dict[int, BlockList]:
        """The prefiller's blocks by group index."""
        return {
            group: BlockList(first=first, ids=column_of(ids))
            for group, (first, ids) in enumerate(zip(self.first_blocks, self.blocks, strict=True))
        }


class RemotePush(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is told of a prefill that is to be pushed to it: by whom, and under which name.

    ``transfer_id`` is the router's, the same on both sides; ``host`` and ``port`` are of the prefiller's kvd.
    """

    transfer_id: Name
    engine_id: Name
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
