"""Every kind of message has a tag of its own: a table by tags keeps the last of two that share one, silently."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator

import msgspec

import kvd.wire
from kvd.wire.frame import MESSAGES
from kvd.wire.reply import Reply, Request


def declared(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """All structs below one, of whatever module of the wire."""
    for struct in kind.__subclasses__():
        if struct.__module__.startswith("kvd.wire."):
            yield struct
        yield from declared(struct)


def tags() -> list[str]:
    for module in pkgutil.iter_modules(kvd.wire.__path__, "kvd.wire."):
        importlib.import_module(module.name)
    return [str(struct.__struct_config__.tag) for kind in (Request, Reply) for struct in declared(kind)]


def test_no_two_messages_share_a_tag() -> None:
    assert [tag for tag, count in Counter(tags()).items() if count > 1] == []


def test_every_message_that_is_declared_can_be_decoded() -> None:
    assert sorted(tags()) == sorted(MESSAGES)
