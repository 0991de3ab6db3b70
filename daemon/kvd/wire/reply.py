"""What tells answers from requests, and the two answers that any request may get."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True):
    """What one side sends to have it done, or answered."""


class Reply(msgspec.Struct, frozen=True):
    """What answers a request, or is told unasked. It is never answered itself: two sides could do so for ever."""


class Ok(Reply, tag="ok", frozen=True):
    """Done, nothing to say."""


class RefusalFactor(msgspec.Struct, frozen=True):
    """One factor of a refusal or of a comparison: the name and both values, as text for people."""

    name: str
    local: str
    remote: str
    ok: bool
    note: str = ""


class Refused(Reply, tag="refused", frozen=True, kw_only=True):
    """Not done.

    ``code`` is stable (``KVD...``), ``message`` names the cause and both values, ``hint`` the next step. ``final``:
    sending it again will not help, so what would be kept and repeated ends with this.
    """

    code: str
    message: str
    hint: str = ""
    factors: tuple[RefusalFactor, ...] = ()
    final: bool = False
