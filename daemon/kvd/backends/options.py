"""Options of a backend: read by msgspec into the fields of a struct, each refused with what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from kvd.backends.errors import BackendError

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)

MOST_THREADS = 16
MOST_CTAS = 4096

CopyThreads = Annotated[int, Meta(ge=1, le=MOST_THREADS, description=f"1 to {MOST_THREADS}")]
"""How many threads copy a large read of host memory (`kvd.backends.split_lane`); 1 splits nothing."""
ThreadBlocks = Annotated[int, Meta(ge=1, le=MOST_CTAS, description=f"1 to {MOST_CTAS}")]
"""How many thread blocks a copy on a GPU takes at most; 4096 are more than any device runs at once."""
YesOrNo = Annotated[bool, Meta(description="true or false")]
EngineName = Annotated[str, Meta(description="a name")]
Nested = Annotated[dict[str, Any], Meta(description="an object")]


def read_options(kind: type[OptionsT], given: Mapping[str, Any], *, backend: str) -> OptionsT:
    """The options of ``backend`` as ``kind``, whose fields say in their description what they may be.

    Raises:
        BackendError: an option that does not exist, or a value that it cannot have.
    """
    known_options(given, kind.__struct_fields__, backend=backend)
    hints, found = get_type_hints(kind, include_extras=True), {}
    for name, value in given.items():
        try:
            found[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            said = [meta.description for meta in getattr(hints[name], "__metadata__", ())]
            raise BackendError(
                f"option {name} is {value!r}; it is {said[-1] if said else error}", backend=backend
            ) from None
    return kind(**found)


def known_options(given: Mapping[str, Any], known: tuple[str, ...], *, backend: str) -> None:
    """Refuse options that do not exist.

    Raises:
        BackendError: naming them, and those that do.
    """
    if unknown := sorted(set(given) - set(known)):
        raise BackendError(
            f"unknown option {', '.join(unknown)} for {backend}; known are {', '.join(known)}",
            backend=backend,
        )
