"""Checksums of KV: a decoding worker asks one that it has read from for the sums of what it was handed."""

from __future__ import annotations

import msgspec

from kvd.geometry.rank import Rank
from kvd.wire.identity import Endpoint
from kvd.wire.reply import Reply, Request


class SumsOf(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one of the prefiller's groups: ``blocks`` of the request's from number ``first`` on.

    Of their tokens those of class ``which`` (`kvd.topology.checksum.Classes` of ``run`` and ``period``).
    """

    group: int
    first: int
    blocks: int
    run: int = 1
    period: int = 1
    which: int = 0


class GetSums(Request, tag="get_sums", frozen=True, kw_only=True):
    """A decoding worker to one worker of the prefilling engine: the sums of these blocks of a request.

    ``request_id`` is the prefiller's, of a push the transfer id. ``endpoint`` is of the prefiller's kvd. Answered by
    `Sums`, or `Refused`: for good where there are none, else because they are not ready yet.
    """

    engine_id: str
    generation: str
    endpoint: Endpoint
    rank: Rank
    request_id: str
    wanted: tuple[SumsOf, ...]


class Sums(Reply, tag="sums", frozen=True, kw_only=True):
    """The sums that were asked for, in that order, of a prompt of ``tokens`` tokens.

    Of each group the cells of all fields of all its layers on that worker, 8 bytes each, little-endian, in the order
    of its geometry.
    """

    tokens: int
    groups: tuple[bytes, ...]
