"""The Diff document: what `kvctl diff` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from kvctl.views.topology.document import EngineEnd, end_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.topology.compat import Factor
    from kvd.topology.describe import EngineSummary


class DiffFactor(Struct, frozen=True, kw_only=True):
    """One thing that both engines were compared by."""

    name: str
    local: str
    remote: str
    differs: Annotated[
        bool, Meta(description="false also for two names of one thing, and where one side does not tell")
    ]
    ok: Annotated[bool, Meta(description="false where the difference cannot be handled")]
    note: Annotated[str, Meta(description="reason or cost of the difference; may be empty")]


class Diff(Struct, frozen=True, kw_only=True):
    """Two engines, factor by factor."""

    local: EngineEnd
    remote: EngineEnd
    same: Annotated[bool, Meta(description="no factor differs")]
    compatible: Annotated[bool, Meta(description="local can read from remote")]
    factors: tuple[DiffFactor, ...]


def diff_document(local: EngineSummary, remote: EngineSummary, factors: Sequence[Factor]) -> Diff:
    """The document of two engines and what they were compared by."""
    return Diff(
        local=end_document(local),
        remote=end_document(remote),
        same=not any(factor.differs for factor in factors),
        compatible=all(factor.ok for factor in factors),
        factors=tuple(
            DiffFactor(name=f.name, local=f.local, remote=f.remote, differs=f.differs, ok=f.ok, note=f.note)
            for f in factors
        ),
    )
