"""The HostKeys and TrustedHosts documents: what the commands of `kvctl keys` print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, facts, table
from kvd.keys import TrustedKey


class TrustedHost(Struct, frozen=True, kw_only=True):
    """A key that is let in, and where its host's kvd listens."""

    key: Annotated[str, Meta(description="public key, 40 characters of Z85")]
    place: Annotated[str, Meta(description="host or host:port; empty: it is let in and never linked to")]


class HostKeys(Struct, frozen=True, kw_only=True):
    """The public key of this host, and the keys that it trusts."""

    public: str
    file: Annotated[str, Meta(description="where the pair is; its secret key is never printed")]
    line: Annotated[str, Meta(description="what other hosts are to trust: KEY host:port")]
    list_file: str
    trusted: tuple[TrustedHost, ...]
    error: Annotated[
        str, Meta(description="why the list says nothing, or kvd does not follow it; empty: all is well")
    ] = ""
    in_force: Annotated[
        int | None, Meta(description="keys that kvd lets in, as it read them last; null: those of the list")
    ] = None


class TrustedHosts(Struct, frozen=True, kw_only=True):
    """The list of trusted keys after a change, and what changed."""

    list_file: str
    added: tuple[TrustedHost, ...]
    removed: tuple[TrustedHost, ...]
    in_force: Annotated[bool, Meta(description="this host's kvd follows that file and has taken note")]
    trusted: tuple[TrustedHost, ...]
    kvd: Annotated[str, Meta(description="whether this host's kvd has taken note, or why that is not so")] = (
        ""
    )


def trusted_hosts(keys: Iterable[TrustedKey]) -> tuple[TrustedHost, ...]:
    """Lines of a list as they are shown."""
    return tuple(TrustedHost(key=one.key.decode(), place=one.place) for one in keys)


def host_keys_screen(body: HostKeys, _wide: bool) -> ScreenPart:
    """The key, what to type on other hosts, and whom this one trusts."""
    told = facts(
        ("public key", body.public),
        ("in", body.file),
        ("others type", f"kvctl keys trust {_quoted(body.line)}"),
        *_trusts(body),
    )
    return [told, "", _hosts(body.trusted)] if body.trusted else told


def _trusts(body: HostKeys) -> Iterable[tuple[str, str]]:
    if body.in_force is not None:
        yield "kvd lets in", f"the {body.in_force} keys that it read last: {body.error}"
    elif body.error:
        yield "trusts", f"no key: {body.error}"
    if not body.error or body.trusted:
        yield "trusts", f"{len(body.trusted)} keys in {body.list_file}"


def trusted_hosts_screen(body: TrustedHosts, _wide: bool) -> ScreenPart:
    """What changed, then the list."""
    rows = [
        *(("trusts", f"{one.place or '-'} {one.key}") for one in body.added),
        *(("revoked", f"{one.place or '-'} {one.key}") for one in body.removed),
    ]
    told = facts(
        *(rows or [("unchanged", "it was trusted already")]),
        ("in", body.list_file),
        ("kvd", body.kvd),
    )
    return [told, "", _hosts(body.trusted)] if body.trusted else told


def _hosts(hosts: tuple[TrustedHost, ...]) -> ScreenPart:
    return table(hosts, Column("HOST", lambda one: one.place or "-"), Column("KEY", lambda one: one.key))


def _quoted(line: str) -> str:
    """For a shell: keys have characters of its own."""
    key, _, place = line.partition(" ")
    return f"'{key}' {place}".rstrip()


VIEWS = (
    View(HostKeys, host_keys_screen, "trusted", TrustedHost),
    View(TrustedHosts, trusted_hosts_screen),
)
