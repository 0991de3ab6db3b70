"""Trust among kvds: the keys that are in force, who we are by them, and which other kvds may talk to us.

A host is known by its public key. Where all hosts share one pair they cannot be told apart, and each may speak for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvd.addresses import HostPort, is_loopback, join_address
from kvd.keys import (
    ANY_PORT,
    KeyFileError,
    TrustedKey,
    read_pair,
    read_trusted,
    write_pair,
)
from kvd.service.config import CurveSettings
from kvd.service.errors import ConfigError
from kvd.zmtp.curve import CurveServer
from kvd.zmtp.mechanism import Mechanism
from kvd.zmtp.null import Null

Signature = tuple[int, int, int, int]
"""What a file has that changes with what stands in it: its inode, its size, and when it was written and renamed."""

SETTLED_SECONDS = 0.5
"""A list that lets fewer in, and was not renamed to its place, is whole after so long without a change."""
SETTLED_LOOKS = 3
"""It was also looked at so often meanwhile: where the machine stood still, whoever writes it had no time either."""

MOST_REVOKED = 4096
"""Places that are remembered as revoked."""
MOST_TOLD = 16
"""Places with two keys that are named."""
LONGEST_TOLD = 4096
"""Characters of what is said of them: a place in a list may be any word."""

Identity = Literal["none", "shared", "per host"]
"""How hosts are told apart: not at all, not from those that hold the same pair, by a key for each."""

SHARED_KEY = (
    "all hosts share one pair of keys, so this kvd cannot tell them apart: each of them may release the leases of the"
    " others, and speak for their engines"
)
"""What a fleet with one file gives up."""
NO_KEYS = "peers have no keys, so whoever reaches that address may speak for every engine"
"""What a loopback laboratory gives up."""


@dataclass(slots=True)
class _Settling:
    """A list that may be half written: since when it has looked like this, by kvd's own clock, at how many looks."""

    signature: Signature
    since: float
    looks: int = 0


@dataclass(slots=True)
class Keys:
    """Our key pair, the public keys that are let in, and those expected at an endpoint.

    ``listed`` is the file with the trusted ones, None where all hosts share our pair; it is read again when it
    changed. ``error`` says why it could not be, empty where it could: what stood in it before stays in force. ``twice``
    names places with two keys in it. ``file`` is that of our pair, and ``pair`` says why it is not ours any more.
    ``revoked`` are places that had a key since kvd started, the latest last.
    """

    public: bytes
    secret: bytes = field(repr=False)
    authorised: frozenset[bytes] = frozenset()
    servers: dict[HostPort, bytes] = field(default_factory=dict)
    revoked: dict[HostPort, None] = field(default_factory=dict)
    listed: Path | None = None
    error: str = ""
    twice: str = ""
    file: Path | None = None
    pair: str = ""
    _pair_read: Signature | None = None
    _read: Signature | None = None
    _in_force: Signature | None = None
    _settling: _Settling | None = None

    def of(self, host: str, port: int) -> bytes:
        """The public key expected at an endpoint, empty where none is trusted.

        Of one that is not listed it is ours, if ours is among those that are let in: a fleet may share a pair.
        """
        listed = self.servers.get((host, port)) or self.servers.get((host, ANY_PORT))
        return listed or (self.public if self.public in self.authorised else b"")

    def was_revoked(self, host: str, port: int) -> bool:
        """Whether a key was trusted there while this kvd runs, and none is now."""
        return not self.of(host, port) and not self.revoked.keys().isdisjoint(
            {(host, port), (host, ANY_PORT)}
        )

    @property
    def places(self) -> dict[bytes, str]:
        """Where the hosts of the listed keys are, by key."""
        found: dict[bytes, str] = {}
        for (host, port), key in self.servers.items():
            place = join_address(host, port) if port else host
            found[key] = f"{found[key]}, {place}" if key in found else place
        return found

    @property
    def stale(self) -> bool:
        """Whether the list may have changed since it was read, or could not be read. Takes microseconds."""
        return self.listed is not None and (bool(self.error) or _signature(self.listed) != self._read)

    def read(self) -> tuple[TrustedKey, ...]:
        """What stands in the list now; on any thread. Raises `KeyFileError`."""
        if self.listed is None:
            return (TrustedKey(self.public),)
        self._read = _signature(self.listed)  # before it is read: what changes meanwhile is read once more
        return read_trusted(self.listed)

    def look_at_pair(self) -> bool:
        """Whether ``pair`` says something else now, since the file of our pair changed; on any thread."""
        if self.file is None or (found := _signature(self.file)) == self._pair_read:
            return False
        before, self._pair_read = self.pair, found
        try:
            public = read_pair(self.file).public
        except KeyFileError as error:
            self.pair = error.message
        except OSError as error:  # it went while it was read
            self.pair = f"cannot read the keys in {self.file}: {error.strerror}"
        else:
            ours, other = self.public.decode(), public.decode()
            self.pair = (
                f"{self.file} holds the pair {other}, and kvd runs with {ours}" if ours != other else ""
            )
        return self.pair != before

    def half_written(self, trusted: Iterable[TrustedKey]) -> bool:
        """Whether that may be the beginning of a list that is being written: it is to be read once more.

        What was written elsewhere and then renamed, as `kvctl keys` does, is whole and counts at once: it is another
        file, and something was done to it after it was last written.
        """
        read, before = self._read, self._in_force
        if read is None or before is None:
            return False
        inode, _, written, changed = read
        if inode != before[0] and changed > written:
            return False
        if not self.authorised - {one.key for one in trusted}:
            return False
        if self._settling is None or self._settling.signature != read:
            self._settling = _Settling(read, time.monotonic())
        self._settling.looks += 1
        if (
            self._settling.looks >= SETTLED_LOOKS
            and time.monotonic() - self._settling.since >= SETTLED_SECONDS
        ):
            return False
        self._read = None
        return True

    def take(self, trusted: Iterable[TrustedKey]) -> bool:
        """These are trusted from now on, and no others; whether that changes anything."""
        before = self.authorised, self.servers
        found = tuple(trusted)
        self.authorised = frozenset(one.key for one in found)
        gone = self.servers
        self.servers = {(one.host, one.port): one.key for one in found if one.host}
        self.revoked |= dict.fromkeys(gone.keys() - self.servers.keys())
        for place in [*self.revoked][: max(len(self.revoked) - MOST_REVOKED, 0)]:
            del self.revoked[place]
        others = [one for one in found if one.host and self.servers[one.host, one.port] != one.key]
        self.twice = "; ".join(
            f"{one.place} has the keys {one.key.decode()} and {self.servers[one.host, one.port].decode()}"
            for one in others[:MOST_TOLD]
        )[:LONGEST_TOLD]
        self.error, self._in_force, self._settling = "", self._read, None
        return before != (self.authorised, self.servers)


def mechanism_of(keys: Keys | None) -> Mechanism:
    """How the peer socket lets others in: by a key that is authorised as they connect, or, without keys, all."""
    if keys is None:
        return Null()
    return CurveServer(keys.secret, lambda key: key in keys.authorised)


def identity_of(keys: Keys | None) -> Identity:
    """How the hosts of this fleet are told apart."""
    if keys is None:
        return "none"
    return "per host" if keys.listed is not None else "shared"


def gives_up(keys: Keys | None) -> str:
    """What a fleet with these keys cannot be sure of; empty where each host has its own."""
    return {"none": NO_KEYS, "shared": SHARED_KEY, "per host": ""}[identity_of(keys)]


def load(settings: CurveSettings) -> Keys | None:
    """The keys that the settings name, None where they name none. Raises `ConfigError` naming the file and line."""
    if not settings.key_file:
        if settings.authorized_keys:
            raise ConfigError(
                f"peer.curve.authorized_keys is {settings.authorized_keys!r} but peer.curve.key_file is not set",
                hint="make a pair with `kvctl keys generate` and name the file",
            )
        return None
    try:
        pair = read_pair(Path(settings.key_file))
        listed = Path(settings.authorized_keys) if settings.authorized_keys else None
        keys = Keys(pair.public, pair.secret, listed=listed, file=Path(settings.key_file))
        keys.take(keys.read())
    except KeyFileError as error:
        raise _unusable(error) from None
    return keys


def create(path: Path) -> str:
    """Write a new pair to ``path``, readable by its owner only; returns the public key. Raises `ConfigError`."""
    try:
        return write_pair(path).decode()
    except KeyFileError as error:
        raise _unusable(error) from None


def _unusable(error: KeyFileError) -> ConfigError:
    """The error that keeps kvd from starting, with the code of the file that is to blame."""
    told = ConfigError(error.message, hint=error.hint)
    told.code = error.code
    return told


def refuse_open_bind(host: str, keys: Keys | None) -> None:
    """Raise `ConfigError` for a peer socket that the network can reach and anybody may use."""
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"peer.listen is on {host!r}, which is not loopback, and peer.curve.key_file is not set: whoever"
            " reaches that port could read the addresses of KV memory and end leases",
            hint="`kvctl keys generate` makes a pair for this host, and `kvctl keys trust` lets others in: set"
            " peer.curve.key_file and peer.curve.authorized_keys; or one pair for all: `kvd --new-keys FILE`",
        )


def _signature(path: Path) -> Signature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
