"""The proxy contract.

``kv_transfer_params`` as routers carry them from the prefiller's answer to the decoder's request.

The names that stock connectors use keep their meaning, so routers work unchanged; what is ours beyond them
starts with ``kvd_``. Params come from outside: everything is checked, and what is wrong is said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from kvd.topology.blocks import BlockList
from kvd.vllm.errors import BadParams

Read = TypeVar("Read")

CONTRACT = 1
LONGEST_NAME = 512
"""Most characters of a transfer id and an engine id, as in kvd."""
MOST_BLOCKS = 1 << 31
"""Block ids and numbers are below this: vLLM's tables hold 32 bits."""


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is told of a finished prefill.

    ``blocks[g]`` are the prefiller's block ids of group ``g``, the first of which covers block number
    ``first_blocks[g]`` of the request. ``tokens`` is for how many tokens they hold KV. ``lease_seconds``
    counts from ``lease_opened`` (Unix seconds of the prefiller's clock). ``checksum``: checksums of
    the blocks can be asked for.
    """

    engine_id: str
    request_id: str
    generation: str
    host: str
    port: int
    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    lease_seconds: float
    lease_opened: float
    checksum: bool = False

    def block_lists(self) -> dict[int, BlockList]:
        """The prefiller's blocks by group index."""
        return {
            group: BlockList(first=first, ids=np.array(ids, np.int64))
            for group, (first, ids) in enumerate(zip(self.first_blocks, self.blocks, strict=True))
        }


def wants_prefill_here(params: Mapping[str, Any] | None) -> bool:
    """Whether a request is to be prefilled here and decoded elsewhere."""
    return bool(params) and bool((params or {}).get("do_remote_decode"))


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether a request was prefilled elsewhere and is to be decoded here."""
    return bool(params) and bool((params or {}).get("do_remote_prefill"))


def finished_prefill(prefill: RemotePrefill, *, tp: int, pp: int, dcp: int) -> dict[str, Any]:
    """The params that a prefiller's answer carries to the decoder."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.engine_id,
        "remote_request_id": prefill.request_id,
        "remote_host": prefill.host,
        "remote_port": prefill.port,
        "remote_block_ids": [list(ids) for ids in prefill.blocks],
        "remote_num_tokens": prefill.tokens,
        "tp_size": tp,
        "pp_size": pp,
        "dcp_size": dcp,
        "transfer_mode": "pull",
        "kvd_contract": CONTRACT,
        "kvd_first_blocks": list(prefill.first_blocks),
        "kvd_generation": prefill.generation,
        "kvd_lease_seconds": prefill.lease_seconds,
        "kvd_lease_opened": prefill.lease_opened,
        "kvd_checksum": int(prefill.checksum),
    }


def read_remote_prefill(params: Mapping[str, Any], *, own_engine_id: str = "") -> RemotePrefill:
    """The decoder's view of params.

    Raises `BadParams` that names the entry and, where there is one, the next step.
    """
    _check_contract(params, "the prefiller does not run KvdConnector, or another version of it")
    names = {
        "engine_id": "remote_engine_id",
        "request_id": "remote_request_id",
        "generation": "kvd_generation",
        "host": "remote_host",
        "port": "remote_port",
        "tokens": "remote_num_tokens",
        "blocks": "remote_block_ids",
        "first_blocks": "kvd_first_blocks",
        "lease_seconds": "kvd_lease_seconds",
        "lease_opened": "kvd_lease_opened",
    }
    read = _convert(params, names, RemotePrefill, "hand on what the prefiller returned, unchanged")
    read = msgspec.structs.replace(read, checksum=bool(params.get("kvd_checksum")))
    _check(read)
    _check_not_own(read.engine_id, own_engine_id)
    return read


class RemotePush(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is told of a prefill that is to be pushed to it: by whom, and under which name.

    ``transfer_id`` is the router's, the same on both sides; ``host`` and ``port`` are of the prefiller's kvd.
    """

    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


def wants_push(params: Mapping[str, Any] | None) -> bool:
    """Whether the router wants the KV to be pushed: it names the transfer, or the mode."""
    return params is not None and (
        params.get("kvd_transfer_id") is not None or params.get("transfer_mode") == "push"
    )


def read_remote_push(params: Mapping[str, Any], *, own_engine_id: str = "") -> RemotePush:
    """The decoder's view of the params of a push. Raises `BadParams` that names the entry."""
    _check_contract(params, "the router must say which contract it speaks")
    if params.get("transfer_mode") != "push":
        raise BadParams(
            f"kv_transfer_params have kvd_transfer_id and transfer_mode {params.get('transfer_mode')!r}: a transfer id"
            ' belongs to "push"'
        )
    names = {
        "transfer_id": "kvd_transfer_id",
        "engine_id": "remote_engine_id",
        "host": "remote_host",
        "port": "remote_port",
    }
    read = _convert(params, names, RemotePush, "a pushed request needs what names the prefiller")
    _check_not_own(read.engine_id, own_engine_id)
    return read


def _check_contract(params: Mapping[str, Any], why: str) -> None:
    contract = params.get("kvd_contract")
    if contract != CONTRACT:
        raise BadParams(
            f"kv_transfer_params have kvd_contract {contract!r}, this side speaks {CONTRACT}: {why}"
        )


def _convert(params: Mapping[str, Any], names: Mapping[str, str], kind: type[Read], step: str) -> Read:
    """A struct from the entries that ``names`` gives for its fields; ``step`` says what to do where one is missing."""
    if missing := [theirs for theirs in names.values() if theirs not in params]:
        raise BadParams(f"kv_transfer_params lack {', '.join(missing)}: {step}")
    try:
        return msgspec.convert({ours: params[theirs] for ours, theirs in names.items()}, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        entry = where.rstrip("`")
        ours = re.split(r"[\[.]", entry)[0]
        raise BadParams(
            f"kv_transfer_params: {what}, at {names.get(ours, ours)}{entry[len(ours) :]}"
        ) from None


def _check_not_own(engine_id: str, own_engine_id: str) -> None:
    if engine_id == own_engine_id:
        raise BadParams(
            f"kv_transfer_params name this very engine ({own_engine_id}) as the prefiller: two engines share one id,"
            " or the router sent the request back to where it came from"
        )


def _check(read: RemotePrefill) -> None:
    """Raise `BadParams` for values of the right type that mean nothing."""
    lease = (read.lease_seconds, read.lease_opened)
    wrong = ""
    if not read.generation:
        wrong = "kvd_generation is empty, so whose blocks these are is unknown"
    elif len(read.blocks) != len(read.first_blocks):
        wrong = f"remote_block_ids are of {len(read.blocks)} groups and kvd_first_blocks of {len(read.first_blocks)}"
    elif read.tokens < 0:
        wrong = f"remote_num_tokens is {read.tokens}"
    elif not 0 <= read.port < 1 << 16:
        wrong = f"remote_port is {read.port}"
    elif bad := [n for n in (*read.first_blocks, *chain(*read.blocks)) if not 0 <= n < MOST_BLOCKS]:
        wrong = f"{bad[0]} is no block"
    elif not all(math.isfinite(seconds) and seconds >= 0 for seconds in lease):
        wrong = f"kvd_lease_seconds is {lease[0]}, kvd_lease_opened is {lease[1]}"
    if wrong:
        raise BadParams(f"kv_transfer_params: {wrong}")
