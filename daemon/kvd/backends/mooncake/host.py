"""The address at which peers reach a Mooncake engine: what it is where nobody says, and which ones it cannot be."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from kvd.backends.errors import BackendError
from kvd.backends.mooncake.library import NAME

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GLOBAL = "00"


def advertised_host(environ: Mapping[str, str] | None = None) -> str:
    """The address peers are told where no option says it: VLLM_HOST_IP, else that of the default route's interface.

    Without such a route it is the first one of the host's interfaces that is not loopback. Loopback where there is
    none: then there is nobody else to reach this host either.
    """
    environ = os.environ if environ is None else environ
    if given := environ.get("VLLM_HOST_IP"):
        return given
    six = "MC_USE_IPV6" in environ
    family, beyond = (socket.AF_INET6, "2001:db8::1") if six else (socket.AF_INET, "192.0.2.1")
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((beyond, 9))  # sends nothing: it only asks for a route
            return str(probe.getsockname()[0])
    except OSError:
        return next(_ipv6() if six else _ipv4(), "::1" if six else "127.0.0.1")


def check_host(host: str, environ: Mapping[str, str] | None = None) -> None:
    """Refuse an address on which Mooncake would not listen: it does so with one version of IP.

    Raises:
        BackendError: an address of the other version, or one with a port.
    """
    six = "MC_USE_IPV6" in (os.environ if environ is None else environ)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        if ":" in host or not host:
            raise BackendError(
                f"option host is {host!r}; it is an address without a port", backend=NAME
            ) from None
        return  # a name
    if version != (6 if six else 4):
        raise BackendError(
            f"host is {host}, of IP version {version}, and MC_USE_IPV6 is {'' if six else 'not '}set: Mooncake would "
            f"not listen there",
            backend=NAME,
            hint=("unset" if six else "set") + " MC_USE_IPV6, or name another address with the option host",
        )


def _ipv4() -> Iterator[str]:
    """Addresses of this host's interfaces in their order, without loopback."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asked:
        for _, interface in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
                address = ipaddress.IPv4Address(answer[20:24])  # of a sockaddr_in that begins at byte 16
                if not address.is_loopback:
                    yield str(address)


def _ipv6() -> Iterator[str]:
    """The same of those addresses that are valid beyond their link."""
    with suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            address, _, _, scope, *_ = line.split()
            if scope == _GLOBAL:
                yield str(ipaddress.IPv6Address(bytes.fromhex(address)))
