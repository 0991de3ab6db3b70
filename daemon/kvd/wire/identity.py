"""The names of the parties: engines, their workers, peers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvd.geometry.rank import Rank

Role = Literal["prefill", "decode", "both"]
"""vLLM's kv_role in our words: kv_producer is ``prefill``, kv_consumer ``decode``."""


DIGEST_KEY_BYTES = 32
"""Length of the key under which a scheduler makes digests of prompts."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a kvd's peer socket listens; an empty host means "the kvd that you are talking to"."""

    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        """As it stands in messages."""
        return f"{self.host}:{self.port}"


class LeaseKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names a lease from the decoder's side: the prefilling engine, its kvd, its request."""

    engine_id: str
    request_id: str
    endpoint: Endpoint = Endpoint()


ReaderId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
"""Names one claim of one decoder. It is never used twice: a reader that has gone does not come back."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is the same for all workers of an engine.

    ``world_size`` is the number of workers that make it complete; ``facts`` the named values that
    compatibility is decided on (see `kvd.topology.compat`).
    """

    engine_id: str
    model: str
    role: Role = "both"
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    groups: int = 1
    world_size: int = 1
    facts: dict[str, str | int | float | bool | None] = {}


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One worker as it presents itself: all that a peer needs to read from it.

    ``incarnation`` is new at each start of the process. ``geometry`` is what
    `kvd.geometry.codec.encode_worker` made; ``metadata`` what the backend exported. Both are opaque on this
    floor.
    """

    engine: EngineFacts
    rank: Rank
    incarnation: str
    pid: int
    host: str
    backend: str
    geometry: bytes
    metadata: bytes


class Secretive(msgspec.Struct, frozen=True):
    """A struct with a ``digest_key``, which its repr leaves out."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All of it but the secret."""
        return [(f, getattr(self, f)) for f in self.__struct_fields__ if f != "digest_key"]

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({told})"


class EngineCard(Secretive, frozen=True, kw_only=True):
    """One complete engine as a peer sees it; ``generation`` is `generation_of` its workers' incarnations.

    ``digest_key`` is the secret under which its scheduler makes digests of prompts; empty while none is registered, and
    for whoever has no use for it.
    """

    engine: EngineFacts
    generation: str
    workers: tuple[WorkerCard, ...]
    digest_key: bytes = b""

    @property
    def facts(self) -> dict[str, str | int | float | bool | None]:
        """What compatibility is decided on: the engine's facts, and the backends of its workers."""
        return {**self.engine.facts, "backend": ",".join(sorted({worker.backend for worker in self.workers}))}
