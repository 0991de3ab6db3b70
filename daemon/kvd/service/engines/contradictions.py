"""Whether what two processes of an engine say of it agrees."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.wire.identity import EngineFacts

Value = str | int | float | bool | None


def contradiction(here: EngineFacts, there: EngineFacts) -> tuple[str, object, object] | None:
    """The first thing that the two contradict each other in, and both values; None where they are of one engine.

    Files come and go, so one process may have found out its weights and another not.
    """
    if here == there:
        return None
    for name in EngineFacts.__struct_fields__:
        mine, theirs = getattr(here, name), getattr(there, name)
        if name != "facts" and mine != theirs:
            return name, mine, theirs
    return next(_unlike(here.facts, there.facts), None)


def _unlike(here: dict[str, Value], there: dict[str, Value]) -> Iterator[tuple[str, Value, Value]]:
    for name in sorted({*here, *there} - {"weights_source"}):
        told = name in here and name in there
        if here.get(name) != there.get(name) and (told or name not in ("weights", "config")):
            yield name, here.get(name), there.get(name)
