"""Types of a document's fields, with their units; the descriptions stand in the JSON Schemas."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta

SCHEMA_VERSION = 1
"""Of all documents."""

Bytes = Annotated[int, Meta(ge=0, description="bytes")]
Seconds = Annotated[float, Meta(ge=0, description="seconds")]
BytesPerSecond = Annotated[float, Meta(ge=0, description="bytes per second")]
Count = Annotated[int, Meta(ge=0)]
Time = Annotated[datetime, Meta(tz=True, description="RFC 3339, UTC")]
Scalar = str | int | float | bool | None
RankName = Annotated[str, Meta(description="a worker's place in its engine: tp0, tp1.pp2, tp0.dcp1")]
Mode = Literal["pull", "push"]
