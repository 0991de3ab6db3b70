"""What tells answers from requests, and the two answers that any request may get."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvd.shown import MAX_WORD, brief, cut
from kvd.wire.codes import OthersCode, RefusalCode
from kvd.wire.limits import MOST_FACTS, Id, Text

LongText: TypeAlias = Annotated[str, Meta(max_length=4 << 20)]
"""Of an earlier kvd a refusal may be long. Ours has no more than 1,000 characters."""


MOST_REFUSED = 64
"""Factors that a refusal names. There are about thirty."""


class Request(msgspec.Struct, frozen=True):
    """What one side sends to have it done, or answered."""


class Reply(msgspec.Struct, frozen=True):
    """What answers a request, or is told unasked. It is never answered itself: two sides could do so for ever."""


class Ok(Reply, tag="ok", frozen=True):
    """Done, nothing to say."""


class RefusalFactor(msgspec.Struct, frozen=True):
    """One factor of a refusal or of a comparison: the name and both values, as text for people."""

    name: Id
    local: Text
    remote: Text
    ok: bool
    note: Text = ""


class Refused(Reply, tag="refused", frozen=True, kw_only=True):
    """Not done.

    ``code`` is stable (`kvd.wire.codes`), ``message`` names the cause and both values, ``hint`` the next step.
    ``final``: sending it again will not help, so what would be kept and repeated ends with this.
    """

    code: Id
    message: LongText
    hint: Text = ""
    factors: Annotated[tuple[RefusalFactor, ...], Meta(max_length=MOST_FACTS)] = ()
    final: bool = False


def refusal(
    code: RefusalCode | OthersCode,
    message: str,
    *,
    hint: str = "",
    factors: tuple[RefusalFactor, ...] = (),
    final: bool = False,
) -> Refused:
    """A `Refused` that is small whatever stands in it: what causes it must not be answered by a thousand times more.

    Of more than `MOST_REFUSED` factors those are kept that do not agree.
    """
    if len(factors) > MOST_REFUSED:
        factors = tuple(sorted(factors, key=lambda factor: factor.ok)[:MOST_REFUSED])
    return Refused(
        code=code,
        message=brief(message),
        hint=brief(hint),
        factors=tuple(_small(factor) for factor in factors),
        final=final,
    )


def _small(factor: RefusalFactor) -> RefusalFactor:
    texts = (factor.name, factor.local, factor.remote, factor.note)
    if max(map(len, texts)) <= MAX_WORD:
        return factor
    name, local, remote, note = (cut(text, MAX_WORD) for text in texts)
    return RefusalFactor(name, local, remote, factor.ok, note)
