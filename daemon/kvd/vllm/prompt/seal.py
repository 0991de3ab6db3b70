"""The seal of a prefill: what a decoder is told of it is what the prefiller said, entry for entry.

The digest binds the prompt alone. Without a seal a client could hand on valid params with other blocks in them, and
read another's.
"""

from __future__ import annotations

import hmac
from operator import attrgetter

import msgspec

from kvd.vllm.prompt.digest import keyed_hash
from kvd.worker.remote import RemotePrefill

SEAL_BITS = 128
_DOMAIN = "kvd params seal 1"
"""Changes with what is sealed or how. No digest of a prompt is a seal: what is hashed there begins otherwise."""
_ENCODE = msgspec.msgpack.Encoder().encode
_parts = attrgetter(*(name for name in RemotePrefill.__struct_fields__ if name != "seal"))
_DIGITS = 3
"""Of seconds. Some routers' JSON gives another last bit back than it was given."""


def sealed(key: bytes, prefill: RemotePrefill) -> RemotePrefill:
    """The prefill under its seal, for `finished_prefill`. Its times are in whole milliseconds then."""
    prefill = msgspec.structs.replace(
        prefill,
        lease_seconds=round(float(prefill.lease_seconds), _DIGITS),
        lease_opened=round(float(prefill.lease_opened), _DIGITS),
    )
    return msgspec.structs.replace(prefill, seal=_seal(key, prefill))


def is_sealed(key: bytes, prefill: RemotePrefill) -> bool:
    """Whether all of a prefill is as who has the key sealed it."""
    return hmac.compare_digest(_seal(key, prefill).encode(), prefill.seal.encode())


def _seal(key: bytes, prefill: RemotePrefill) -> str:
    body = [round(part, _DIGITS) if isinstance(part, float) else part for part in _parts(prefill)]
    return keyed_hash(key, _ENCODE((_DOMAIN, body)))[: SEAL_BITS // 8].hex()
