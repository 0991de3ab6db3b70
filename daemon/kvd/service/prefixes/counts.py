"""How often prefixes were given and taken, by engine, since this kvd was started."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvd.wire.prefixes.cache import MOST_SOURCES, PrefixesGiven, PrefixesTaken
from kvd.wire.transfer import TransferRecord

OTHERS = "others"
"""Stands for the engines beyond the most that are counted by name."""


class PrefixCounts:
    """Of all engines here."""

    def __init__(self) -> None:
        self._given: dict[str, PrefixesGiven] = {}
        self._taken: dict[str, dict[str, PrefixesTaken]] = {}

    @property
    def given(self) -> Mapping[str, PrefixesGiven]:
        """By the engine that gave."""
        return MappingProxyType(self._given)

    def taken(self, engine_id: str) -> tuple[PrefixesTaken, ...]:
        """By the engine that it was taken from."""
        return tuple(self._taken.get(engine_id, {}).values())

    def all_taken(self) -> list[tuple[str, PrefixesTaken]]:
        """The same of all engines, each with the one that took."""
        return [(engine, one) for engine, sources in self._taken.items() for one in sources.values()]

    def told(self, engine_id: str) -> None:
        """Somebody was told of a prefix that an engine holds."""
        known = self._given.get(engine_id, PrefixesGiven())
        self._given[engine_id] = msgspec.structs.replace(known, told=known.told + 1)

    def read(self, engine_id: str, nbytes: int, *, kept: bool) -> None:
        """A worker elsewhere has read of an engine's prefix."""
        known = self._given.get(engine_id, PrefixesGiven())
        self._given[engine_id] = (
            msgspec.structs.replace(known, kept=known.kept + 1, bytes=known.bytes + nbytes)
            if kept
            else msgspec.structs.replace(known, lost=known.lost + 1)
        )

    def took(self, record: TransferRecord, *, first: bool) -> None:
        """A worker here has, and is the ``first`` of its engine or another one."""
        sources = self._taken.setdefault(record.local_engine, {})
        name = record.remote_engine
        name = name if name in sources or len(sources) < MOST_SOURCES else OTHERS
        known = sources.get(name, PrefixesTaken(source=name))
        if record.state == "done":
            known = msgspec.structs.replace(
                known,
                reads=known.reads + 1,
                tokens=known.tokens + (record.tokens if first else 0),
                bytes=known.bytes + record.bytes,
            )
        elif record.code == "PREFIX_LOST":
            known = msgspec.structs.replace(known, lost=known.lost + 1)
        sources[name] = known

    def forget(self, engine_id: str) -> None:
        """The next engine of that name may be another user's."""
        self._given.pop(engine_id, None)
        self._taken.pop(engine_id, None)
