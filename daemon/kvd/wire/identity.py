"""The names of the parties: engines, their workers, peers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvd.geometry.rank import Rank
from kvd.wire.limits import MOST_RANKS, Blob, Facts, Id, Incarnation, Port, Secret, Size, Text, Whole

Role = Literal["prefill", "decode", "both"]
"""vLLM's kv_role in our words: kv_producer is ``prefill``, kv_consumer ``decode``."""


HostName: TypeAlias = Annotated[str, msgspec.Meta(max_length=255)]
"""A name or an address: DNS has no longer names."""

DIGEST_KEY_BYTES = 32
"""Length of the key under which a scheduler makes digests of prompts."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a kvd's peer socket listens; an empty host means "the kvd that you are talking to"."""

    host: HostName = ""
    port: Port = 0

    def __str__(self) -> str:
        """As it stands in messages."""
        return f"{self.host}:{self.port}"


HERE = Endpoint()
"""The kvd that one is talking to, or is."""


class LeaseKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names a lease from the decoder's side: the prefilling engine, its kvd, its request."""

    engine_id: Id
    request_id: Id
    endpoint: Endpoint = Endpoint()


ReaderId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
"""Names one claim of one decoder. It is never used twice: a reader that has gone does not come back."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is the same for all workers of an engine.

    ``world_size`` is the number of workers that make it complete; ``facts`` the named values that
    compatibility is decided on (see `kvd.topology.compat`).
    """

    engine_id: Id
    model: Text
    role: Role = "both"
    tp: Size = 1
    pp: Size = 1
    dcp: Size = 1
    groups: Size = 1
    world_size: Size = 1
    facts: Facts = {}


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One worker as it presents itself: all that a peer needs to read from it.

    ``incarnation`` is new at each start of the process. ``geometry`` is what
    `kvd.geometry.codec.encode_worker` made; ``metadata`` what the backend exported. Both are opaque on this
    floor.
    """

    engine: EngineFacts
    rank: Rank
    incarnation: Incarnation
    pid: Whole
    host: Id
    backend: Id
    geometry: Blob
    metadata: Blob


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
    for whoever has no use for it. Engines of one ``compatibility_class`` fit (`kvd.topology.compatibility_class`): that
    is for people and routers, and decides nothing here.
    """

    engine: EngineFacts
    generation: Id
    workers: Annotated[tuple[WorkerCard, ...], msgspec.Meta(max_length=MOST_RANKS)]
    digest_key: Secret = b""
    compatibility_class: Id = ""

    @property
    def facts(self) -> Facts:
        """What compatibility is decided on: the engine's facts, and the backends of its workers."""
        return {**self.engine.facts, "backend": ",".join(sorted({worker.backend for worker in self.workers}))}
