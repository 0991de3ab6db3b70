"""Checksums of KV: a decoding worker asks one that it has read from for the sums of what it was handed."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.limits import Count, Id
from kvd.wire.reply import Reply, Request

MOST_ASKED = 4096
"""Parts of a question for sums: one for each group, and for each class of its tokens."""

PackedCells: TypeAlias = Annotated[bytes, Meta(max_length=16 << 20)]


class SumsOf(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one of the prefiller's groups: ``blocks`` of the request's from number ``first`` on.

    Of their tokens those of class ``which`` (`kvd.topology.checksums.sums.Classes` of ``run`` and ``period``).
    """

    group: Count
    first: Count
    blocks: Count
    run: Count = 1
    period: Count = 1
    which: Count = 0


class GetSums(Request, tag="get_sums", frozen=True, kw_only=True):
    """A decoding worker to one worker of the prefilling engine: the sums of these blocks of a request.

    ``request_id`` is the prefiller's, of a push the transfer id. ``endpoint`` is of the prefiller's kvd. Answered by
    `Sums`, or `Refused`: for good where there are none, else because they are not ready yet.
    """

    engine_id: Id
    generation: Id
    endpoint: Endpoint
    rank: Rank
    request_id: Id
    wanted: Annotated[tuple[SumsOf, ...], Meta(max_length=MOST_ASKED)]


class Sums(Reply, tag="sums", frozen=True, kw_only=True):
    """The sums that were asked for, in that order, of a prompt of ``tokens`` tokens.

    Of each group the cells of all fields of all its layers on that worker, 8 bytes each, little-endian, in the order
    of its geometry.
    """

    tokens: Count
    groups: Annotated[tuple[PackedCells, ...], Meta(max_length=MOST_ASKED)]
