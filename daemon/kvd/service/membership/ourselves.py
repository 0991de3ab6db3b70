"""Whether an address is this kvd's own: DNS names all kvds, also the one that asks."""

from __future__ import annotations

import ipaddress
import socket


def listens_at(bound: tuple[str, int], host: str, port: int) -> bool:
    """Whether a kvd that is bound to ``bound`` is reached at an address: it asks the kernel, and nobody else."""
    if port != bound[1]:
        return False
    try:
        address, ours = ipaddress.ip_address(host), ipaddress.ip_address(bound[0])
    except ValueError:
        return host == bound[0]
    return address == ours or (ours.is_unspecified and _is_of_this_host(address))


def _is_of_this_host(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
