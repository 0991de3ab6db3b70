"""Types of a document's fields, with their units; the descriptions stand in the JSON Schemas."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

SCHEMA_VERSION = 1
"""Of all documents."""

Bytes = Annotated[int, Meta(ge=0, description="bytes")]
Seconds = Annotated[float, Meta(ge=0, description="seconds")]
BytesPerSecond = Annotated[float, Meta(ge=0, description="bytes per second")]
Count = Annotated[int, Meta(ge=0)]
Time = Annotated[datetime, Meta(tz=True, description="RFC 3339, UTC")]
Scalar = str | int | float | bool | None
Mode = Literal["pull", "push"]

Made = TypeVar("Made", bound=Struct)


def filled(kind: type[Made], *sources: object, **others: Any) -> Made:
    """A struct with ``others``, and for each other field the attribute of that name of the first source that has it.

    Properties are attributes too. Raises `TypeError` for a field that nothing gives, also where it has a default.
    """
    names = [name for name in kind.__struct_fields__ if name not in others]
    taken = {name: getattr(one, name) for one in reversed(sources) for name in names if hasattr(one, name)}
    if missing := [name for name in names if name not in taken]:
        raise TypeError(f"nothing gives {', '.join(missing)} of {kind.__name__}")
    return kind(**taken, **others)
