"""Framing: one msgpack frame ``[version, correlation, message]`` over ROUTER/DEALER.

The message is a tagged union of the structs in this package. Requests carry a correlation id > 0 that the
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

from typing import TypeAlias

import msgspec

from kvd.wire.checksum import GetSums, Sums
from kvd.wire.errors import Malformed, UnknownMessage, VersionMismatch
from kvd.wire.handshake import (
    DescribeEngine,
    EngineDescribed,
    EngineEnded,
    GetPeer,
    PeerGone,
    PeerReady,
    Ping,
    Pong,
)
from kvd.wire.lease import (
    LeaseClaim,
    LeaseClaimed,
    LeaseClosed,
    LeaseEnded,
    LeaseExtend,
    LeaseOpened,
    LeaseRelease,
)
from kvd.wire.order import (
    ClearForced,
    ForcedCleared,
    ForcedMisses,
    ForceMiss,
    ForcePlan,
    GetForced,
    ReportForced,
)
from kvd.wire.outcomes import GetOutcomes, Outcomes, ReportOutcomes
from kvd.wire.push import PushAnnounce, PushDone, PushProgress, PushWithdraw
from kvd.wire.query import EngineList, GetStatus, KvdStatus, ListEngines, ListWorkers, WorkerList
from kvd.wire.registration import (
    Heartbeat,
    NotRegistered,
    Registered,
    RegisterScheduler,
    RegisterWorker,
    Unregister,
)
from kvd.wire.reply import Ok, Refused
from kvd.wire.transfer import GetKeptEngine, KeptEngine, ListTransfers, ReportTransfers, TransferList

WIRE_VERSION = 2

Message: TypeAlias = (
    RegisterWorker
    | RegisterScheduler
    | Registered
    | Heartbeat
    | NotRegistered
    | Unregister
    | GetPeer
    | PeerReady
    | PeerGone
    | DescribeEngine
    | EngineDescribed
    | EngineEnded
    | Ping
    | Pong
    | LeaseOpened
    | LeaseClaim
    | LeaseClaimed
    | LeaseRelease
    | LeaseExtend
    | LeaseEnded
    | LeaseClosed
    | PushAnnounce
    | PushWithdraw
    | PushProgress
    | PushDone
    | GetSums
    | Sums
    | ReportTransfers
    | ListTransfers
    | TransferList
    | GetKeptEngine
    | KeptEngine
    | ForceMiss
    | ForcePlan
    | ClearForced
    | ForcedCleared
    | ReportForced
    | GetForced
    | ForcedMisses
    | ListEngines
    | EngineList
    | ListWorkers
    | WorkerList
    | GetStatus
    | KvdStatus
    | ReportOutcomes
    | GetOutcomes
    | Outcomes
    | Ok
    | Refused
)


class _Envelope(msgspec.Struct, array_like=True):
    version: int
    correlation: int
    body: msgspec.Raw


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_BODY: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
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
        if kind is not None and kind not in KINDS:
            raise UnknownMessage(
                f"no message of kind {kind!r} in wire version {WIRE_VERSION}", envelope.correlation
            ) from None
        raise Malformed(f"not a valid message of kind {kind!r}: {error}", envelope.correlation) from None


def kind_of(message: Message) -> str:
    """The message's tag, as it stands on the wire and in counters."""
    return str(type(message).__struct_config__.tag)


KINDS = frozenset(str(struct.__struct_config__.tag) for struct in Message.__args__)
"""All kinds of message of this version."""


def _kind(body: bytes) -> str | None:
    try:
        value = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return str(value.get("type"))[:80] if isinstance(value, dict) else None
