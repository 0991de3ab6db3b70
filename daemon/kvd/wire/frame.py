"""Framing: one msgpack frame ``[version, correlation, message]`` over ROUTER/DEALER.

The message is a `Request` or a `Reply` of this package, told by its tag. Requests carry a correlation id > 0 that the
reply repeats; pushes carry 0. A reader decodes in two steps, so that a wrong version or an unknown kind is
told apart from noise.

Wire versions
    1  the first one
    2  claims and releases of leases name their reader
       schedulers report how requests were served (`kvd.wire.outcomes`)
       decoding workers ask for checksums of KV (`kvd.wire.checksum`)
       cards bring a key for digests of prompts, pushes such a digest; misses have codes (`kvd.wire.miss`)
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TypeAlias

import msgspec

from kvd.wire import checksum, handshake, lease, order, outcomes, push, query, registration, reply, transfer
from kvd.wire.errors import Malformed, UnknownMessage, VersionMismatch
from kvd.wire.reply import Reply, Request

WIRE_VERSION = 2

Message: TypeAlias = Request | Reply
_FAMILIES = (checksum, handshake, lease, order, outcomes, push, query, registration, reply, transfer)
MESSAGES = {
    str(struct.__struct_config__.tag): struct
    for family in _FAMILIES
    for struct in vars(family).values()
    if isinstance(struct, type) and issubclass(struct, Message) and struct not in (Request, Reply)
}
"""All kinds of message of this version, by their tags."""


class _Envelope(msgspec.Struct, array_like=True):
    version: int
    correlation: int
    body: msgspec.Raw


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_BODY: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(reduce(or_, MESSAGES.values()))
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message | msgspec.Raw, correlation: int = 0) -> bytes:
    """The frame for ``message``; ``correlation`` > 0 for a request and its reply, 0 for a push."""
    return _ENCODER.encode((WIRE_VERSION, correlation, message))


def body(message: Message) -> msgspec.Raw:
    """What `encode` puts into a frame, for a message that many get: the card of a large engine has 100s of KB."""
    return msgspec.Raw(_ENCODER.encode(message))


def decode(frame: bytes) -> tuple[Message, int]:
    """The message of a frame and its correlation id.

    Raises `Malformed`, `VersionMismatch` or `UnknownMessage`, each with the correlation id where it could be
    read.
    """
    try:
        envelope = _ENVELOPE.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"not a kvd frame: {error}") from None
    if envelope.version != WIRE_VERSION:
        raise VersionMismatch(
            f"the frame has wire version {envelope.version}, this side speaks {WIRE_VERSION}",
            envelope.correlation,
        )
    try:
        return _BODY.decode(envelope.body), envelope.correlation
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        kind = _kind(envelope.body)
        if kind is not None and kind not in MESSAGES:
            raise UnknownMessage(
                f"no message of kind {kind!r} in wire version {WIRE_VERSION}", envelope.correlation
            ) from None
        raise Malformed(f"not a valid message of kind {kind!r}: {error}", envelope.correlation) from None


def kind_of(message: Message) -> str:
    """The message's tag, as it stands on the wire and in counters."""
    return str(type(message).__struct_config__.tag)


def _kind(body: bytes) -> str | None:
    try:
        value = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return str(value.get("type"))[:80] if isinstance(value, dict) else None
