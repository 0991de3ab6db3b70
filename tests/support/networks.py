"""Two hosts on one machine: network namespaces with a wire between them, the second with processes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Network:
    """One host. ``before`` goes before a command line that is to run there; ``cut`` and ``mend`` are of its wire."""

    name: str
    wire: str
    address: str
    before: tuple[str, ...]

    @property
    def beside(self) -> tuple[str, ...]:
        """The same for what needs the network alone, and may see processes outside."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """From now on nothing comes in or goes out."""
        ip("-n", self.name, "link", "set", self.wire, "down")

    def mend(self) -> None:
        """End that."""
        ip("-n", self.name, "link", "set", self.wire, "up")


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Both hosts, which reach each other and nobody else. Skips the test where there can be none."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces take root, ip and unshare")
    names = [f"kvctl-{os.getpid()}-{side}" for side in "ab"]
    wires = [f"kv{os.getpid() % 100_000}{side}" for side in "ab"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
                pytest.skip("no network namespaces can be made here")
        ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for name, wire, address in zip(names, wires, addresses, strict=True):
            ip("link", "set", wire, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
        own = ((), ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
        here, there = (
            Network(name, wire, address, ("ip", "netns", "exec", name, *more))
            for name, wire, address, more in zip(names, wires, addresses, own, strict=True)
        )
        yield here, there
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """One order to the kernel's network."""
    subprocess.run(["ip", *arguments], check=True)
