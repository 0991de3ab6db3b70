"""How often prefixes were given and taken, by engine, since this kvd was started."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from kvd.service.fairness.tally import Tally, beyond
from kvd.wire.limits import MOST
from kvd.wire.prefixes.cache import MOST_SOURCES, PrefixesGiven, PrefixesTaken
from kvd.wire.transfer import TransferRecord

OTHERS = "others"
"""Stands for the engines beyond the most that are counted by name."""
MOST_SOURCES_OF_UID = 3072
"""Most names of engines that a user's engines read from, some 3 KB each; eight of them read from 256 each."""
MOST_SOURCES_IN_ALL = 4096
"""The same of all users."""


class PrefixCounts:
    """Of all engines here."""

    def __init__(self) -> None:
        self._given: dict[str, PrefixesGiven] = {}
        self._taken: dict[str, dict[str, PrefixesTaken]] = {}
        self._sources: Tally[int] = Tally()
        self._uids: dict[str, int] = {}

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

    def answered(self, engine_id: str, *, busy: bool) -> None:
        """Somebody was told of a prefix that an engine holds, or turned down because that was ``busy``."""
        known = self._given.get(engine_id, PrefixesGiven())
        self._given[engine_id] = (
            msgspec.structs.replace(known, busy=known.busy + 1)
            if busy
            else msgspec.structs.replace(known, told=known.told + 1)
        )

    def read(self, engine_id: str, nbytes: int, *, kept: bool) -> None:
        """A worker elsewhere has read of an engine's prefix."""
        known = self._given.get(engine_id, PrefixesGiven())
        self._given[engine_id] = (
            msgspec.structs.replace(known, kept=known.kept + 1, bytes=_sum(known.bytes, nbytes))
            if kept
            else msgspec.structs.replace(known, lost=known.lost + 1)
        )

    def took(self, record: TransferRecord, *, first: bool) -> None:
        """A worker here has, and is the ``first`` of its engine or another one."""
        sources = self._taken.setdefault(record.local_engine, {})
        name = record.remote_engine if self._has_room(sources, record) else OTHERS
        known = sources.get(name, PrefixesTaken(source=name))
        if record.state == "done":
            known = msgspec.structs.replace(
                known,
                reads=known.reads + 1,
                tokens=_sum(known.tokens, record.tokens if first else 0),
                bytes=_sum(known.bytes, record.bytes),
            )
        elif record.code == "PREFIX_LOST":
            known = msgspec.structs.replace(known, lost=known.lost + 1)
        if name not in sources:
            uid = self._uids.setdefault(record.local_engine, record.uid)
            self._sources.add(uid)
        sources[name] = known

    def _has_room(self, sources: Mapping[str, PrefixesTaken], record: TransferRecord) -> bool:
        """Whether the engine that was read from is counted by its name, or may be."""
        if record.remote_engine in sources:
            return True
        bounds = (MOST_SOURCES_OF_UID, MOST_SOURCES_IN_ALL)
        uid = self._uids.get(record.local_engine, record.uid)
        return len(sources) < MOST_SOURCES and not beyond(self._sources, "sources", uid, 1, bounds)

    def forget(self, engine_id: str) -> None:
        """The next engine of that name may be another user's."""
        self._given.pop(engine_id, None)
        if sources := self._taken.pop(engine_id, None):
            self._sources.add(self._uids.pop(engine_id), -len(sources))


def _sum(known: int, more: int) -> int:
    """Both together, or the most that an answer can tell: what is added may be as large as that itself."""
    return min(known + more, MOST)
