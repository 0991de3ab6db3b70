"""Valid messages with hostile contents: of every kind, ids that others use too, numbers at the ends of their ranges."""

from __future__ import annotations

import functools
import os
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from msgspec import inspect

from kvd.wire.errors import WireError
from kvd.wire.frame import MESSAGES, Message, decode, encode
from tests.support.daemons import geometry

GEOMETRY = geometry()
IDS = ("e", "p", "d", "r1", "r2", "", "x" * 512, "ä\N{SNOWMAN}", "a\nb", "\x1b[31m", "../e", "0")
HOSTS = ("127.0.0.1", "", "localhost", "nowhere.invalid", "::1", "256.0.0.1")
NUMBERS = (0, 1, 2, 3, 7, 255, 4096, 65_535, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -1, -(1 << 63))
SECONDS = (0.0, 0.001, 0.25, 1.0, 60.0, 3600.0, 1e9, 1e308, -1.0, 5e-324)
MOST_ITEMS = 8
DEEP = 6


def message(dice: random.Random, kinds: Sequence[str] = tuple(MESSAGES)) -> tuple[bytes, str]:
    """A frame that kvd can decode, and its kind."""
    while True:
        kind = dice.choice(kinds)
        made = _struct(_fields(kind), dice, 0)
        try:
            frame = encode(cast("Message", made), dice.randrange(1, 1 << 32))
            decode(frame)
        except (WireError, msgspec.MsgspecError, OverflowError, ValueError):
            continue  # its fields are each in range, and together they are not
        return frame, kind


@functools.cache
def _fields(kind: str) -> inspect.StructType:
    return cast("inspect.StructType", inspect.type_info(MESSAGES[kind]))


def _struct(kind: inspect.StructType, dice: random.Random, depth: int) -> object:
    fields: dict[str, Any] = {}
    for field in kind.fields:
        if not field.required and dice.random() < 0.4:
            continue
        fields[field.name] = _named(field.name, field.type, dice, depth)
    return kind.cls(**fields)


def _named(name: str, kind: inspect.Type, dice: random.Random, depth: int) -> object:
    if name == "pid" and dice.random() < 0.9:
        return os.getpid()
    if name == "geometry" and dice.random() < 0.7:
        return GEOMETRY
    if name == "host" and isinstance(kind, inspect.StrType):
        return dice.choice(HOSTS)
    return _value(kind, dice, depth)


def _value(kind: inspect.Type, dice: random.Random, depth: int) -> object:
    make = _MAKERS.get(type(kind))
    if make is None:
        raise TypeError(f"the wire has a kind of field that is made nowhere here: {kind}; add it to _MAKERS")
    return make(kind, dice, depth)


def _text(kind: inspect.StrType, dice: random.Random, _depth: int) -> str:
    least, most = kind.min_length or 0, min(kind.max_length or 600, 600)
    text = (
        dice.choice(IDS)
        if dice.random() < 0.8
        else "".join(dice.choices(string.printable, k=dice.randint(0, 40)))
    )
    return (text[:most] + "x" * least)[: max(least, min(most, len(text)))]


def _bytes(kind: inspect.BytesType, dice: random.Random, _depth: int) -> bytes:
    least, most = kind.min_length or 0, min(kind.max_length or 4096, 4096)
    return dice.randbytes(dice.choice([least, min(most, least + 32), most]))


def _int(kind: inspect.IntType, dice: random.Random, _depth: int) -> int:
    least = kind.ge if kind.ge is not None else (kind.gt + 1 if kind.gt is not None else -(1 << 63))
    most = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else (1 << 64) - 1)
    return max(int(least), min(int(most), dice.choice(NUMBERS)))


def _float(kind: inspect.FloatType, dice: random.Random, _depth: int) -> float:
    least = kind.ge if kind.ge is not None else (kind.gt if kind.gt is not None else -1e308)
    most = kind.le if kind.le is not None else (kind.lt if kind.lt is not None else 1e308)
    return max(float(least), min(float(most), dice.choice(SECONDS)))


def _items(kind: Any, dice: random.Random, depth: int) -> tuple[object, ...]:
    least, most = kind.min_length or 0, min(kind.max_length or MOST_ITEMS, MOST_ITEMS)
    count = least if depth > DEEP else dice.randint(least, max(least, most))
    return tuple(_value(kind.item_type, dice, depth + 1) for _ in range(count))


def _fixed(kind: inspect.TupleType, dice: random.Random, depth: int) -> tuple[object, ...]:
    return tuple(_value(item, dice, depth + 1) for item in kind.item_types)


def _dict(kind: inspect.DictType, dice: random.Random, depth: int) -> dict[object, object]:
    return {
        _value(kind.key_type, dice, depth + 1): _value(kind.value_type, dice, depth + 1)
        for _ in range(dice.randint(0, 4))
    }


_MAKERS: dict[type[inspect.Type], Callable[[Any, random.Random, int], object]] = {
    inspect.StrType: _text,
    inspect.BytesType: _bytes,
    inspect.IntType: _int,
    inspect.FloatType: _float,
    inspect.BoolType: lambda _kind, dice, _depth: dice.random() < 0.5,
    inspect.NoneType: lambda _kind, _dice, _depth: None,
    inspect.LiteralType: lambda kind, dice, _depth: dice.choice(kind.values),
    inspect.VarTupleType: _items,
    inspect.ListType: _items,
    inspect.TupleType: _fixed,
    inspect.DictType: _dict,
    inspect.StructType: _struct,
    inspect.UnionType: lambda kind, dice, depth: _value(dice.choice(kind.types), dice, depth),
}
