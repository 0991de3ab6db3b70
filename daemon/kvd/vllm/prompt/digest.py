"""The digest of a prompt: equal where two engines compute the same KV for it, and worth nothing to who lacks the key.

It covers all that decides the KV of a prompt's first tokens. Blocks' hashes would not do: they depend on a process's
hash seed, and end with the last full block. A digest without a key would not do either: routers log what carries it,
and a short prompt could be found by trying.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvd.wire.identity import DIGEST_KEY_BYTES

DIGEST_BITS = 128
_DOMAIN = "kvd prompt digest 1"
"""Changes with what is hashed or how, so that digests of two ways never agree by accident."""


_ENCODE = msgspec.msgpack.Encoder(enc_hook=lambda number_or_array: number_or_array.tolist()).encode
"""Each part has its own type and length in msgpack, so no two prompts have the same bytes. numpy's become Python's."""


def new_key() -> bytes:
    """A prefilling scheduler's key, drawn at its start; decoders get it from kvd alone."""
    return secrets.token_bytes(DIGEST_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Feature:
    """An image, a sound, ...: ``identifier`` names its content, ``length`` tokens from ``offset`` on stand for it."""

    modality: str
    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Embeds:
    """Embeddings of a prompt that was given as such: ``rows`` are their bytes, ``form`` their type and row's shape.

    ``tokens`` says for each position whether a token stands there all the same; none where no token does.
    """

    rows: bytes | memoryview
    form: str
    tokens: Sequence[bool] = ()


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What decides the KV of a prompt; ``adapter`` is a LoRA adapter's fingerprint, empty without one."""

    token_ids: Sequence[int]
    adapter: str = ""
    features: Sequence[Feature] = ()
    cache_salt: str = ""
    embeds: Embeds | None = None


def prompt_digest(key: bytes, parts: PromptParts, tokens: int) -> str:
    """The digest of a prompt's first ``tokens`` tokens: `DIGEST_BITS` bits in hexadecimal.

    Of features those count that begin before ``tokens``, and whole: what a model makes of one may depend on all of it.
    Raises `ValueError` for a key that is none.
    """
    if len(key) != DIGEST_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes, wanted are {DIGEST_KEY_BYTES}")
    ids = parts.token_ids if len(parts.token_ids) <= tokens else parts.token_ids[:tokens]
    features = [
        (_plain(f.modality), _plain(f.identifier), f.offset, f.length)
        for f in parts.features
        if f.offset < tokens
    ]
    body = (
        _DOMAIN,
        tokens,
        ids,
        _plain(parts.adapter),
        features,
        _plain(parts.cache_salt),
        _embeds(parts.embeds, tokens),
    )
    return keyed_hash(key, _ENCODE(body))[: DIGEST_BITS // 8].hex()


def keyed_hash(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA256."""
    made = _begun(key).copy()
    made.update(data)
    return made.digest()


@functools.lru_cache(maxsize=64)
def _begun(key: bytes) -> hmac.HMAC:
    """One that has nothing but the key, of a prefiller that was compared with lately.

    OpenSSL takes ten times as long to begin another as to copy it.
    """
    return hmac.new(key, digestmod="sha256")


def _embeds(embeds: Embeds | None, tokens: int) -> tuple[bytes, str, list[bool]] | None:
    if embeds is None:
        return None
    return (
        hashlib.sha256(embeds.rows).digest(),
        embeds.form,
        [bool(there) for there in embeds.tokens[:tokens]],
    )


def _plain(text: str) -> bytes:
    """Text as bytes; what comes out of a client's JSON may hold half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")
