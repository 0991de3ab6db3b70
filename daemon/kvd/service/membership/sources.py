"""The source that the settings name, and what is wrong with these settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from kvd.installed import own_version
from kvd.service.config import Config, endpoint
from kvd.service.errors import ConfigError
from kvd.service.membership import dns, etcd_settings
from kvd.service.membership.members import MemberSource
from kvd.service.membership.ourselves import listens_at
from kvd.service.sockets.resolver import Resolver
from kvd.wire.identity import Endpoint


@dataclass(frozen=True, slots=True)
class Ourselves:
    """What a source needs of this kvd: where it listens, who it is, and its means to look names up.

    ``key`` is its public one, empty without keys.
    """

    bound: tuple[str, int]
    endpoint: Endpoint
    kvd_id: str
    generation: str
    key: str
    resolver: Resolver


def source_of(config: Config, me: Ourselves) -> MemberSource | None:
    """What follows the source that the settings name; None for ``static``. `check` was called before."""
    settings = config.membership
    if settings.source == "dns":
        return partial(dns.follow, settings.dns, me.resolver.look_again, partial(listens_at, me.bound))
    if settings.source == "etcd":
        from kvd.service.membership import etcd  # it needs aiohttp, which is an extra

        name = settings.etcd.host or me.kvd_id
        it = etcd.ourselves(settings.etcd.cluster, name, me.endpoint, me.generation, me.key, own_version())
        return partial(etcd.follow, it, etcd_settings.access_of(settings.etcd), me.resolver)
    return None


def check(config: Config) -> None:
    """Raise `ConfigError` for settings of membership with which kvd does not start."""
    settings = config.membership
    if settings.source == "static":
        return
    if not config.peer.listen:
        raise ConfigError(
            f"membership.source is {settings.source} but peer.listen is not set: no other kvd could be linked",
            hint="set peer.listen, or membership.source: static",
        )
    if settings.source == "etcd":
        etcd_settings.access_of(settings.etcd)
    if settings.source == "dns":
        if not settings.dns.name:
            raise ConfigError(
                "membership.source is dns but membership.dns.name is not set",
                hint="write for example kvd.NAMESPACE.svc.cluster.local:7766",
            )
        _, port = endpoint(settings.dns.name, "membership.dns.name")
        if not port:
            raise ConfigError(
                f"membership.dns.name: {settings.dns.name!r} has port 0",
                hint="name the port of the other kvds",
            )
