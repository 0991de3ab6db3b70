"""Why there is no connection to another kvd, in words, and what a person is to type about it."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from kvd.errors import joined
from kvd.service.sockets.channel import ChannelEnd
from kvd.wire.errors import VersionMismatch, WireError
from kvd.wire.identity import Endpoint
from kvd.zmtp.errors import ZmtpError

REACH = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT}


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The key that is expected of the peer, and what the peer's host types to trust ours: 'KEY' HOST:PORT.

    Both are empty where peers have no keys.
    """

    theirs: bytes = b""
    ours: str = ""


NO_KEYS = LinkKeys()


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a connection, and the next step, which may be empty."""

    reason: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return joined(self.reason, self.hint)


def untrusted(endpoint: Endpoint, *, revoked: bool) -> Trouble:
    """No key is known for a kvd that is to be dialled; ``revoked``: one was, until it was revoked."""
    if revoked:  # what that host shows may be the key that was stolen: nobody is told to trust it again
        return Trouble(
            f"no key is trusted for the kvd at {endpoint}: the one that it had was revoked here",
            "leave it so until that host has a new pair; if it is to be out for good, take it out of peer.connect",
        )
    return Trouble(
        f"no key is trusted for the kvd at {endpoint}",
        f"`kvctl keys trust KEY {endpoint}` with what `kvctl keys show` prints there",
    )


def not_dialled(endpoint: Endpoint, error: OSError) -> Trouble:
    """A connection could not be made."""
    reason = os.strerror(error.errno) if error.errno else str(error) or "no answer"
    if error.errno in REACH or isinstance(error, TimeoutError):
        return Trouble(reason, f"does kvd run there, and may this host reach {endpoint}?")
    return Trouble(reason)


def unreadable(error: WireError) -> Trouble:
    """The peer sent what is no message here."""
    hint = "give both hosts one version of kvd; until then engines compute what they would load"
    other = isinstance(error, VersionMismatch)
    return Trouble(f"sent what cannot be read: {error.message}", hint if other else "")


def ended(endpoint: Endpoint, cause: ChannelEnd, keys: LinkKeys, *, shaken: bool) -> Trouble:
    """A connection ended; ``shaken``: both sides had shown their keys before."""
    if isinstance(cause, ZmtpError):
        if cause.kind == "not_authorised":
            return Trouble(
                "it does not let this host's key in",
                f"there, type: kvctl keys trust {keys.ours} (with --replace where it names another key)",
            )
        limit = " (peer.max_message_bytes)" if cause.kind == "too_large" else ""
        return Trouble(cause.message + limit)
    if cause == "closed" and keys.theirs and not shaken:
        return Trouble(
            f"it ended the handshake: it may have another key than {keys.theirs.decode()}, which is trusted here",
            f"`kvctl keys show` there prints its key; if it is another: kvctl keys trust 'KEY' {endpoint} --replace",
        )
    return Trouble(
        {
            "closed": "the other side closed it",
            "slow": "no answer on it in time",
            "unread": "the other side does not read",
            "told": "it is not used any more",
        }[cause]
    )
