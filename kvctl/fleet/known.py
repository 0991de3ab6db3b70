"""Which hosts are known, and how each is asked: of a context, or of what this host's kvd knows and trusts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvctl.cli.parsing import near_misses
from kvctl.errors import NotPermitted, UsageError
from kvctl.fleet.contexts import Context
from kvd.addresses import HostPort, join_address, split_address
from kvd.client.remote import RemoteKvd
from kvd.keys import ANY_PORT, KeyFileError, KeyPair, TrustedKey, read_pair, read_trusted
from kvd.wire.query import KvdStatus


@dataclass(frozen=True)
class KnownHosts:
    """The places to ask, the pair to speak with (None: hosts have no keys), and the keys that hosts must have.

    ``source`` says in errors where that stands; ``own`` is the place of this host's kvd, None where it is not one of
    those that were asked for.
    """

    places: tuple[HostPort, ...]
    pair: KeyPair | None
    trusted: tuple[TrustedKey, ...]
    source: str
    own: HostPort | None = None

    def of(self, name: str) -> RemoteKvd:
        """The kvd at ``host:port``, or at a known ``host``. Raises `UsageError`: not known, or no key for it."""
        return self.at(self.place(name))

    def place(self, name: str) -> HostPort:
        """The place that somebody calls ``name``. Raises `UsageError`."""
        try:
            return split_address(name)
        except ValueError:
            bare = name.strip("[]")
            every: list[HostPort] = [*self.places, *([self.own] if self.own else [])]
            found = [place for place in every if place[0] == bare]
            if len(found) == 1:
                return found[0]
            names = [join_address(*place) for place in every]
            shown = ", ".join(join_address(*place) for place in found)
            what = (
                f"has more than one port: {shown}" if found else near_misses(name, names) or "none is known"
            )
            raise UsageError(
                f"--host: {name!r} is no host of {self.source}; {what}",
                "give HOST:PORT, as peer.advertise has it",
            ) from None

    @cached_property
    def _keys(self) -> dict[tuple[str, int], bytes]:
        return {(one.host, one.port): one.key for one in self.trusted}

    @cached_property
    def _trusted_keys(self) -> frozenset[bytes]:
        return frozenset(self._keys.values())

    def at(self, place: HostPort) -> RemoteKvd:
        """How the kvd at a place is asked. Raises `UsageError` where no key is known for it."""
        if self.pair is None:
            return RemoteKvd(*place)
        # A fleet may share one pair, as kvd takes it too: then ours is among those that are trusted.
        shared = self.pair.public if self.pair.public in self._trusted_keys else None
        key = self._keys.get(place) or self._keys.get((place[0], ANY_PORT)) or shared
        if key is None:
            raise UsageError(
                f"no key is known for the kvd at {join_address(*place)}: {self.source} has none",
                f"kvctl keys trust KEY {join_address(*place)}, with what kvctl keys show prints there",
            )
        return RemoteKvd(*place, server=key, public=self.pair.public, secret=self.pair.secret)


def of_context(name: str, context: Context) -> KnownHosts:
    """The hosts of a context. Raises `UsageError` and `NotPermitted` for keys that cannot be read."""
    source = f"context {name!r}"
    pair, trusted = _read(context.pair, context.trusted) if context.keys else (None, ())
    places = [split_address(host) for host in context.hosts] or _places(trusted)
    return KnownHosts(tuple(places), pair, trusted, source)


def of_kvd(status: KvdStatus) -> KnownHosts:
    """The hosts that this host's kvd knows. Raises `UsageError` and `NotPermitted` for keys that cannot be read."""
    source = f"kvd {status.kvd_id}"
    keys = status.keys
    if keys is None:
        raise UsageError(
            f"{source} has no peer socket, so no other host is known here",
            "set peer.listen in kvd.yaml, or write a context: kvctl context --help",
        )
    peers = [(peer.endpoint.host, peer.endpoint.port) for peer in status.peers]
    own = (status.endpoint.host, status.endpoint.port) if status.endpoint.port else None
    pair: KeyPair | None = None
    trusted: tuple[TrustedKey, ...] = ()
    if keys.identity != "none":
        pair, trusted = _read(Path(keys.key_file), Path(keys.list_file) if keys.list_file else None)
    places = dict.fromkeys((*peers, *_places(trusted)))
    return KnownHosts(tuple(place for place in places if place != own), pair, trusted, source, own)


def _places(trusted: Iterable[TrustedKey]) -> list[HostPort]:
    return list(dict.fromkeys((one.host, one.port) for one in trusted if one.host and one.port))


def _read(pair: Path, trusted: Path | None) -> tuple[KeyPair, tuple[TrustedKey, ...]]:
    """A pair and the keys of others; without a list all hosts have that pair, at any place."""
    try:
        found = read_pair(pair)
        return found, read_trusted(trusted) if trusted is not None else (TrustedKey(found.public),)
    except KeyFileError as error:
        if isinstance(error.__context__, PermissionError):
            raise NotPermitted(
                error.message, "become root or kvd's user, or use a context with a key of your own"
            ) from None
        raise UsageError(error.message, error.hint) from None
