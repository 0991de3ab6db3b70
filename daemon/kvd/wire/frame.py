"""Framing: one msgpack frame ``[version, correlation, message]`` over ROUTER/DEALER.

The message is a `Request` or a `Reply` of this package, told by its tag. Requests carry a correlation id > 0 that the
reply repeats; pushes carry 0.

A reader knows what a frame may cost before it builds anything. Of a large one it looks at the front alone first, where
the kind stands, and so the number of bytes that it may have (`kvd.wire.limits`). The types of the fields bound all
else: the decoder looks at the length of an array before it takes the first item. A wrong version or an unknown kind is
told apart from noise.

Wire versions
    1  the first one
    2  claims and releases of leases name their reader
       schedulers report how requests were served (`kvd.wire.outcomes`)
       decoding workers ask for checksums of KV (`kvd.wire.checksum`)
       cards bring a key for digests of prompts, pushes such a digest; misses have codes (`kvd.wire.miss`)
       kvd tells workers of a confirmed claim where that names a generation and is not alone; its answer says so
       (`kvd.wire.lease`)
       operators ask what workers hold of their peers, and have it given up (`kvd.wire.agent`)
       schedulers ask who holds a prefix, workers whether it still did when they had read it (`kvd.wire.prefix`)
       schedulers tell which prefixes their engines hold, kvds ask each other for it (`kvd.wire.prefixes.hints`)
       operators ask what engines hold of prefixes (`kvd.wire.prefixes.cache`)
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.shown import brief, cut, escaped
from kvd.wire import (
    agent,
    checksum,
    drain,
    handshake,
    lease,
    order,
    outcomes,
    part,
    prefix,
    push,
    query,
    registration,
    reply,
    transfer,
)
from kvd.wire.errors import Malformed, TooLarge, UnknownMessage, VersionMismatch, WireError
from kvd.wire.limits import MOST, MOST_WHOLE_WORKERS, SMALL, Id, bytes_allowed
from kvd.wire.prefixes import cache, hints
from kvd.wire.reply import Reply, Request

WIRE_VERSION = 2

Message: TypeAlias = Request | Reply
_FAMILIES = (
    agent,
    cache,
    checksum,
    drain,
    handshake,
    hints,
    lease,
    order,
    outcomes,
    part,
    prefix,
    push,
    query,
    registration,
    reply,
    transfer,
)
MESSAGES = {
    str(struct.__struct_config__.tag): struct
    for family in _FAMILIES
    for struct in vars(family).values()
    if isinstance(struct, type) and issubclass(struct, Message) and struct not in (Request, Reply)
}
"""All kinds of message of this version, by their tags."""


if TYPE_CHECKING:
    _AnyMessage: TypeAlias = Message
else:
    _AnyMessage = reduce(or_, MESSAGES.values())
Correlation: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]


class _Frame(msgspec.Struct, array_like=True):
    version: int
    correlation: Correlation
    message: _AnyMessage


class _Envelope(msgspec.Struct, array_like=True):
    version: int
    correlation: Correlation
    message: msgspec.Raw


class _Tag(msgspec.Struct):
    type: str = ""


class _Front(msgspec.Struct, frozen=True):
    kind: str
    correlation: int


_FRAME = msgspec.msgpack.Decoder(_Frame)
_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_TAG = msgspec.msgpack.Decoder(_Tag)
_ENCODER = msgspec.msgpack.Encoder()
_NUMBER = rb"([\x00-\x7f]|\xcc.|\xcd..|\xce.{4}|\xcf.{8})"
_FRONT = re.compile(
    rb"\x93" + _NUMBER + _NUMBER + rb"(?:[\x80-\x8f]|\xde..|\xdf.{4})\xa4type([\xa0-\xbf]|\xd9.)",
    re.DOTALL,
)
"""A frame begins so: an array of three, version, correlation, then a map with the tag first."""
_PLACE = re.compile(r" - at `\$([a-z_.\[\]0-9]*)`$")
_STEP = re.compile(r"\.([a-z_]+)|\[([0-9]+)\]")
_FIELDS = msgspec.msgpack.Decoder(Annotated[dict[Id, msgspec.Raw], Meta(max_length=64)])
_ITEMS = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=8192)])
_VALUE = msgspec.msgpack.Decoder(int | float | str | bool | None)
_CARDS = ("engine_described", "peer_ready", "for_worker")
"""Kinds that hold the card of an engine, whole or a part of it."""
_SHOWN = 80
"""Characters of a kind or a value that nobody knows, in a message."""


def encode(message: Message | msgspec.Raw, correlation: int = 0) -> bytes:
    """The frame for ``message``; ``correlation`` > 0 for a request and its reply, 0 for a push."""
    return _ENCODER.encode((WIRE_VERSION, correlation, message))


def body(message: Message) -> msgspec.Raw:
    """What `encode` puts into a frame, for a message that many get: the card of a large engine has 100s of KB."""
    return msgspec.Raw(_ENCODER.encode(message))


def decode(frame: bytes, most: int = MOST, unwanted: Container[str] | None = None) -> tuple[Message, int]:
    """The message of a frame and its correlation id. ``most`` is how many bytes this side takes, of whatever kind.

    A kvd says which kinds are ``unwanted`` here, so that large ones are refused by their front, and takes cards of so
    many workers at a time as it can decode in a short turn.

    Raises `TooLarge`, `Malformed`, `VersionMismatch` or `UnknownMessage`, each with the correlation id where it could
    be read.
    """
    front = _front(frame, most) if len(frame) > SMALL else None
    if front is not None and unwanted is not None:
        _refuse_for_daemon(frame, front, unwanted)
    try:
        decoded = _FRAME.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _wrong(frame, error, front) from None
    if decoded.version != WIRE_VERSION:
        raise _of_another_version(decoded.version, decoded.correlation)
    return decoded.message, decoded.correlation


def kind_of(message: Message) -> str:
    """The message's tag, as it stands on the wire and in counters."""
    return str(type(message).__struct_config__.tag)


def _front(frame: bytes, most: int) -> _Front:
    """The front of a large frame. Raises where it is of no kind, or the frame is larger than its kind may be."""
    found = _FRONT.match(frame)
    if found is None:
        raise TooLarge(
            f"a frame of {len(frame)} bytes; at most {SMALL} are taken where it does not begin with"
            " [version, id, {type: kind"
        )
    version, correlation = (msgspec.msgpack.decode(found[at], type=int) for at in (1, 2))
    length = found[3][-1] if len(found[3]) > 1 else found[3][0] & 0x1F
    kind = frame[found.end() : found.end() + length].decode(errors="replace")
    if version != WIRE_VERSION:
        raise _of_another_version(version, correlation)
    if kind not in MESSAGES:
        raise _unknown(kind, correlation)
    allowed = min(bytes_allowed(kind), most)
    if len(frame) > allowed:
        raise TooLarge(f"a {kind} of {len(frame)} bytes; at most {allowed} are taken", correlation)
    return _Front(kind, correlation)


def _refuse_for_daemon(frame: bytes, front: _Front, unwanted: Container[str]) -> None:
    if front.kind in unwanted:
        raise TooLarge(
            f"a {front.kind} of {len(frame)} bytes, which is taken from nobody here", front.correlation
        )
    # However the name of that field is packed, its letters stand there.
    if front.kind in _CARDS and (count := frame.count(b"facts")) > MOST_WHOLE_WORKERS:
        raise TooLarge(
            f"a {front.kind} with the facts of {count} workers; at most {MOST_WHOLE_WORKERS} are taken, and more in"
            " parts (give both kvds one version)",
            front.correlation,
        )


def _wrong(frame: bytes, error: Exception, front: _Front | None) -> WireError:
    """What is wrong with a frame that cannot be decoded, with its correlation id if it can be had."""
    why = str(error).replace("`$[2]", "`$")
    if front is not None:  # it is not gone through once more
        return Malformed(
            f"not a valid message of kind {front.kind!r}: {brief(escaped(why))}", front.correlation
        )
    try:
        envelope = _ENVELOPE.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        return Malformed(f"not a kvd frame: {brief(escaped(str(fault)))}")
    correlation = envelope.correlation
    if envelope.version != WIRE_VERSION:
        return _of_another_version(envelope.version, correlation)
    try:
        kind = _TAG.decode(envelope.message).type
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Malformed("not a valid message: it is no map with a `type`", correlation)
    if kind not in MESSAGES:
        return _unknown(kind, correlation)
    found = _found(envelope.message, why)
    return Malformed(f"not a valid message of kind {kind!r}: {brief(escaped(why))}{found}", correlation)


def _found(message: msgspec.Raw, why: str) -> str:
    """What stands where the decoder found a fault: the length of an array or a text, or the number itself."""
    place = _PLACE.search(why)
    steps = _STEP.findall(place[1]) if place is not None else []
    if not steps:
        return ""
    found = message
    try:
        for name, index in steps:
            found = _FIELDS.decode(found)[name] if name else _ITEMS.decode(found)[int(index)]
        value = _VALUE.decode(found)
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError, IndexError):
        return _length(found)
    return f"; it has {len(value)}" if isinstance(value, str) else f"; it is {value}"


def _length(value: msgspec.Raw) -> str:
    """How many items an array or a map of msgpack says it has, or bytes a binary."""
    raw = bytes(memoryview(value)[:5])
    size = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(raw[0] if raw else 0)
    return f"; it has {int.from_bytes(raw[1 : 1 + size])}" if size else ""


def _of_another_version(version: int, correlation: int) -> VersionMismatch:
    return VersionMismatch(
        f"the frame has wire version {version}, this side speaks {WIRE_VERSION}", correlation
    )


def _unknown(kind: str, correlation: int) -> UnknownMessage:
    return UnknownMessage(
        f"no message of kind {cut(kind, _SHOWN)!r} in wire version {WIRE_VERSION}", correlation
    )
