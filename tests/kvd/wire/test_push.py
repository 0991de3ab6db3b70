"""The messages of pushes on the wire: nothing is lost in them, they are small, and older senders are understood."""

from __future__ import annotations

import msgspec
import pytest

from kvd.geometry.rank import Rank
from kvd.wire.errors import Malformed
from kvd.wire.frame import WIRE_VERSION, Message, decode, encode
from kvd.wire.identity import Endpoint
from kvd.wire.push import (
    BlockRun,
    LayersThere,
    PushAnnounce,
    PushDone,
    PushKey,
    PushProgress,
    PushWithdraw,
)
from kvd.wire.reply import Refused

KEY = PushKey(
    transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint("10.0.0.1", 9401), decoder="d", rank=Rank(1, 2, 3),
    attempt=4, decoder_endpoint=Endpoint("::1", 9402),
)  # fmt: skip
ANNOUNCE = PushAnnounce(
    key=KEY, generations=("g", "h"), tokens=100, computed=16, blocks=(BlockRun(0, 1, (7, 9)), BlockRun(1, 0, ())),
    window=b"\x00\xff", seconds=1.5,
)  # fmt: skip
THERE = (LayersThere(group=0, layers=("a", "b"), tokens=48, blocks=BlockRun(0, 0, (5,))),)


def plain(message: Message) -> dict[str, object]:
    """A message as it stands on the wire, field by field."""
    made: dict[str, object] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return made


@pytest.mark.parametrize(
    "message",
    [
        ANNOUNCE,
        PushWithdraw(key=KEY, generation="g"),
        PushProgress(key=KEY, source=Rank(1), there=THERE),
        PushProgress(key=KEY, source=Rank(0), failed="why", quiesced=True),
        PushDone(key=KEY),
        Refused(code="KVD-X", message="no", final=True),
    ],
)
def test_what_is_sent_is_what_arrives(message: Message) -> None:
    assert decode(encode(message, 7)) == (message, 7)


def test_100000_blocks_take_half_a_megabyte() -> None:
    many = msgspec.structs.replace(ANNOUNCE, blocks=(BlockRun(0, 0, tuple(range(1_000_000, 1_100_000))),))
    assert len(encode(many, 1)) < 512 << 10


def test_fields_that_came_later_may_be_missing() -> None:
    def without(message: Message, *fields: str) -> Message:
        bare = {k: v for k, v in plain(message).items() if k not in fields}
        return decode(msgspec.msgpack.encode((WIRE_VERSION, 1, bare)))[0]

    assert without(PushWithdraw(key=KEY, generation="g"), "generation") == PushWithdraw(key=KEY)
    refused = Refused(code="KVD-X", message="no", final=True)
    assert without(refused, "final") == Refused(code="KVD-X", message="no")


@pytest.mark.parametrize(
    "field", ["key", "generations", "tokens", "computed", "blocks", "landing", "seconds"]
)
def test_an_announcement_lacks_nothing(field: str) -> None:
    bare = {k: v for k, v in plain(ANNOUNCE).items() if k != field}
    with pytest.raises(Malformed, match=field):
        decode(msgspec.msgpack.encode((WIRE_VERSION, 1, bare)))
