"""Addresses of hosts: taken apart, put together and judged here alone. Every floor may import this."""

from __future__ import annotations

import ipaddress
import re

HostPort = tuple[str, int]
"""A host and its port."""
MOST_PORT = 65535
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:\s\[\]]+):(\d{1,5})")


def split_address(text: str) -> HostPort:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises `ValueError` for anything else."""
    found = _ADDRESS.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not host:port")
    if int(found[2]) > MOST_PORT:
        raise ValueError(f"{text!r} is not host:port: {found[2]} is no port, the last one is {MOST_PORT}")
    return found[1].strip("[]"), int(found[2])


def join_address(host: str, port: int | str) -> str:
    """``host:port``, brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this host reaches an address; any name but localhost is taken for one that others reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
