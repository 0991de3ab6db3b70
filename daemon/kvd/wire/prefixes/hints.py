"""Hints: which prefixes an engine holds, roughly, so that only engines that hold more of a prompt are asked for it.

A scheduler tells its kvd (`TellHints`); other kvds ask that one (`GetHints`), and each question waits there until there
is something new. Both are told what changed since what they know, or all of it.

What is told of a prefix is its *tag*, the first eight bytes of the hash of its last block. A tag is no hash: nobody can
ask for a prefix with it. It may be out of date; what the holder answers counts, and what it says once it was read.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.wire.limits import Count, Id, Seconds
from kvd.wire.reply import Reply, Request

TAG_BYTES = 8
MOST_TAGS = 65_536
"""Tags of one engine, half a megabyte: one for each 256 tokens of a cache of 16 million."""
MOST_HINTED = 256
"""Engines of one kvd that another one is told hints of, as many as it knows of one kvd."""

Tags: TypeAlias = Annotated[bytes, Meta(max_length=MOST_TAGS * TAG_BYTES)]
"""Tags, one after the other."""


class HintChange(msgspec.Struct, frozen=True, kw_only=True):
    """What ``version`` of an engine's hints has that ``since`` has not, and the other way round; 0 has none.

    ``hash_tokens`` are those of a block with a hash, and of each ``every``-th such block of a prompt there is a tag if
    the prefix that ends with it is held.
    """

    version: Annotated[int, Meta(ge=1, le=(1 << 62))]
    since: Count
    hash_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    every: Annotated[int, Meta(ge=1, le=1 << 20)]
    added: Tags = b""
    dropped: Tags = b""


class TellHints(Request, tag="tell_hints", frozen=True, kw_only=True):
    """An engine's scheduler: what changed of what it holds. Answered by `HintsTaken`."""

    engine_id: Id
    change: HintChange


class HintsTaken(Reply, tag="hints_taken", frozen=True, kw_only=True):
    """The version that is known now; 0: none, tell all."""

    version: Count


class KnownHints(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the hints of one generation of an engine that the asker has."""

    engine_id: Id
    generation: Id
    version: Count


class GetHints(Request, tag="get_hints", frozen=True, kw_only=True):
    """A kvd to another one: what is new of the engines that it was given the cards of?

    Answered by `HintsTold` as soon as anything is, but not before ``after`` seconds, and after `WAIT_SECONDS` more in
    any case.
    """

    known: Annotated[tuple[KnownHints, ...], Meta(max_length=MOST_HINTED)] = ()
    after: Seconds = 0.0


class EngineHints(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of the hints of one engine."""

    engine_id: Id
    generation: Id
    change: HintChange


class HintsTold(Reply, tag="hints_told", frozen=True, kw_only=True):
    """What is new, of as many engines as there is room for: the others are told of with the next answer."""

    engines: Annotated[tuple[EngineHints, ...], Meta(max_length=MOST_HINTED)] = ()


WAIT_SECONDS = 10.0
"""How long a `GetHints` waits where nothing is new."""
