"""The proxy contract.

``kv_transfer_params`` as routers carry them from the prefiller's answer to the decoder's request.

The names that stock connectors use keep their meaning, so routers work unchanged; what is ours beyond them
starts with ``kvd_``. Params come from outside: everything is checked, and what is wrong is said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from kvd.vllm.errors import BadParams
from kvd.worker.remote import RemotePrefill, RemotePush

T = TypeVar("T")

CONTRACT = 2
"""Version of the entries. 2 has the prompt's digest, a seal, and kvd's address under names of its own."""
PUSH_CONTRACTS = (1, CONTRACT)
"""What a router may say in push: its entries are the same in both."""
MOST_BLOCKS = 1 << 31
"""Block ids and numbers are below this: vLLM's tables hold 32 bits."""
LONGEST_SHOWN = 80
"""Characters of a client's value that a message shows."""
LONGEST_INT = 1024
"""Bits of a number that a message shows in digits: Python makes none of very long ones."""
_ENCODE = msgspec.msgpack.Encoder().encode
_TRUE = (True,)
"""``1`` and ``1.0`` are equal to it."""
_ENTRIES = {
    "engine_id": "remote_engine_id",
    "request_id": "remote_request_id",
    "generation": "kvd_generation",
    "host": "kvd_host",
    "port": "kvd_port",
    "digest": "kvd_digest",
    "seal": "kvd_seal",
    "tokens": "remote_num_tokens",
    "blocks": "remote_block_ids",
    "first_blocks": "kvd_first_blocks",
    "lease_seconds": "kvd_lease_seconds",
    "lease_opened": "kvd_lease_opened",
}
"""The entry for each field of a `RemotePrefill` that a decoder must be given."""


def wants_prefill_here(params: object) -> bool:
    """Whether a request is to be prefilled here and decoded elsewhere. Only a true one says so: text never does."""
    return isinstance(params, Mapping) and params.get("do_remote_decode") in _TRUE


def wants_remote_prefill(params: object) -> bool:
    """Whether a request says that it was prefilled elsewhere and is to be decoded here; how well is looked at later."""
    return (
        isinstance(params, Mapping)
        and bool(params.get("do_remote_prefill"))
        and not wants_prefill_here(params)
    )


def finished_prefill(
    prefill: RemotePrefill,
    *,
    tp: int,
    pp: int,
    dcp: int,
    told: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The params that a prefiller's answer carries to the decoder; what is ``told`` besides is for routers alone."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **{entry: getattr(prefill, field) for field, entry in _ENTRIES.items()},
        "remote_block_ids": [list(ids) for ids in prefill.blocks],
        "kvd_first_blocks": list(prefill.first_blocks),
        "remote_host": prefill.host,
        "remote_port": prefill.port,
        "tp_size": tp,
        "pp_size": pp,
        "dcp_size": dcp,
        "transfer_mode": "pull",
        "kvd_contract": CONTRACT,
        "kvd_checksum": int(prefill.checksum),
        **(told or {}),
    }


def read_remote_prefill(params: Mapping[str, Any], *, own_engine_id: str = "") -> RemotePrefill:
    """The decoder's view of params.

    Raises `BadParams` that names the entry and, where there is one, the next step.
    """
    _check_contract(params, (CONTRACT,), "the prefiller does not run KvdConnector, or another version of it")
    names = {**_ENTRIES, **_address(params)}
    read = _convert(params, names, RemotePrefill, "hand on what the prefiller returned, unchanged")
    read = msgspec.structs.replace(read, checksum=bool(params.get("kvd_checksum")))
    _check(read, names["port"])
    _check_not_own(read.engine_id, own_engine_id)
    return read


def wants_push(params: object) -> bool:
    """Whether the router wants the KV to be pushed: it names the transfer, or the mode."""
    return isinstance(params, Mapping) and (
        params.get("kvd_transfer_id") is not None or params.get("transfer_mode") == "push"
    )


def read_remote_push(params: Mapping[str, Any], *, own_engine_id: str = "") -> RemotePush:
    """The decoder's view of the params of a push. Raises `BadParams` that names the entry."""
    _check_contract(params, PUSH_CONTRACTS, "the router must say which contract it speaks")
    if (mode := params.get("transfer_mode")) != "push":
        raise BadParams(
            f"kv_transfer_params have kvd_transfer_id and transfer_mode {short(mode)}:"
            ' a transfer id belongs to "push"'
        )
    names = {"transfer_id": "kvd_transfer_id", "engine_id": "remote_engine_id", **_address(params)}
    read = _convert(params, names, RemotePush, "a pushed request needs what names the prefiller")
    _check_not_own(read.engine_id, own_engine_id)
    return read


def _address(params: Mapping[str, Any]) -> dict[str, str]:
    """Where kvd's address stands: some routers put the host of the prefiller's HTTP address under ``remote_host``."""
    ours = params.get("kvd_host") is not None or params.get("kvd_port") is not None
    return (
        {"host": "kvd_host", "port": "kvd_port"} if ours else {"host": "remote_host", "port": "remote_port"}
    )


def _check_contract(params: Mapping[str, Any], spoken: tuple[int, ...], why: str) -> None:
    wanted = params.get("do_remote_prefill")
    if wanted not in _TRUE:
        raise BadParams(
            f"kv_transfer_params have do_remote_prefill {short(wanted)}, that must be true or false"
        )
    contract = params.get("kvd_contract")
    if isinstance(contract, bool) or contract not in spoken:
        raise BadParams(
            f"kv_transfer_params have kvd_contract {short(contract)}, this side speaks {CONTRACT}: {why}"
        )


def _convert(params: Mapping[str, Any], names: Mapping[str, str], kind: type[T], step: str) -> T:
    """A struct from the entries that ``names`` gives for its fields; ``step`` says what to do where one is missing."""
    # Nearly all params are as the prefiller gave them: then nothing is looked at one by one.
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        read = msgspec.convert({ours: params[theirs] for ours, theirs in names.items()}, kind)
        _ENCODE(read)  # half a surrogate pair cannot be
        return read
    if missing := [theirs for theirs in names.values() if theirs not in params]:
        raise BadParams(f"kv_transfer_params lack {', '.join(missing)}: {step}")
    if broken := [theirs for theirs in names.values() if not _can_be_sent(params[theirs])]:
        raise BadParams(f"kv_transfer_params: {', '.join(broken)}: half a surrogate pair is no text")
    try:
        return msgspec.convert({ours: _whole(params[theirs]) for ours, theirs in names.items()}, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        entry = where.rstrip("`")
        ours = re.split(r"[\[.]", entry)[0]
        raise BadParams(
            f"kv_transfer_params: {what}, at {names.get(ours, ours)}{entry[len(ours) :]}"
        ) from None
    except (ValueError, OverflowError) as error:
        raise BadParams(f"kv_transfer_params cannot be read ({type(error).__name__}): {step}") from None


def _whole(value: Any, depth: int = 2) -> Any:
    """The value with 30 for 30.0, in lists of lists too: JSON has one kind of number, and routers hand on either."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if depth and isinstance(value, (list, tuple)) and set(map(type, value)) & {float, list, tuple}:
        return [_whole(part, depth - 1) for part in value]
    return value


def _can_be_sent(value: object, depth: int = 2) -> bool:
    if depth and isinstance(value, (list, tuple)) and set(map(type, value)) & {str, list, tuple}:
        return all(_can_be_sent(part, depth - 1) for part in value)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def short(value: object) -> str:
    """A client's value for a message: at most about `LONGEST_SHOWN` characters, whatever it is."""
    if not isinstance(value, (str, int, float, type(None))):
        return f"of type {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > LONGEST_INT:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _check_not_own(engine_id: str, own_engine_id: str) -> None:
    if engine_id == own_engine_id:
        raise BadParams(
            f"kv_transfer_params name this very engine ({own_engine_id}) as the prefiller: two engines share one id,"
            " or the router sent the request back to where it came from"
        )


def _check(read: RemotePrefill, port: str) -> None:
    """Raise `BadParams` for values of the right type that mean nothing."""
    lease = (read.lease_seconds, read.lease_opened)
    wrong = ""
    if not read.digest:
        wrong = "kvd_digest is empty, so whether this is the prompt that was prefilled is unknown"
    elif not read.seal:
        wrong = "kvd_seal is empty, so whether a prefiller gave these is unknown"
    elif not read.generation:
        wrong = "kvd_generation is empty, so whose blocks these are is unknown"
    elif len(read.blocks) != len(read.first_blocks):
        wrong = f"remote_block_ids are of {len(read.blocks)} groups and kvd_first_blocks of {len(read.first_blocks)}"
    elif not 0 <= read.tokens < MOST_BLOCKS:
        wrong = f"remote_num_tokens is {short(read.tokens)}"
    elif not 0 <= read.port < 1 << 16:
        wrong = f"{port} is {short(read.port)}"
    elif bad := [n for ids in (read.first_blocks, *read.blocks) for n in _out_of_range(ids)]:
        wrong = f"{short(bad[0])} is no block"
    elif not all(math.isfinite(seconds) and seconds >= 0 for seconds in lease):
        wrong = f"kvd_lease_seconds is {lease[0]}, kvd_lease_opened is {lease[1]}"
    if wrong:
        raise BadParams(f"kv_transfer_params: {wrong}")


def _out_of_range(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The least and the largest of them, where either is no block."""
    ends = (min(ids), max(ids)) if ids else ()
    return tuple(n for n in ends if not 0 <= n < MOST_BLOCKS)
