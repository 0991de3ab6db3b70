"""A wire between two network namespaces that loses, delays and reorders packets, or carries none.

Most kernels have `tc netem` for that; this needs root and the TUN device alone. A thread here carries each packet from
one namespace's device to the other's.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MOST_WAITING = 10_000
"""Packets that are delayed at a time; a wire that is longer loses them."""


class NoNamespaces(Exception):
    """Why there can be none here."""


@dataclass
class Weather:
    """What the wire does to each packet: ``loss`` is a probability, ``delay`` and ``jitter`` are in seconds.

    With jitter packets overtake each other.
    """

    loss: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Wired:
    """One host: a network namespace with an address, and what goes before a command line that is to run there."""

    name: str
    address: str

    @property
    def before(self) -> tuple[str, ...]:
        """The words."""
        return ("ip", "netns", "exec", self.name)


@dataclass
class Wire:
    """The wire, which ``weather`` may be changed of at any time."""

    hosts: tuple[Wired, Wired]
    devices: tuple[int, int]
    dice: random.Random
    weather: Weather = field(default_factory=Weather)
    carried: int = 0
    _ends: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Carry packets until `end`."""
        one, other = self.devices
        across = {one: other, other: one}
        late: list[tuple[float, int, int, bytes]] = []
        while not self._ends.is_set():
            pause = max(0.0, late[0][0] - time.monotonic()) if late else 0.1
            for source in select.select(self.devices, [], [], min(pause, 0.1))[0]:
                packet = os.read(source, 65536)
                weather = self.weather
                if weather.cut or self.dice.random() < weather.loss or len(late) >= MOST_WAITING:
                    continue
                self.carried += 1
                due = time.monotonic() + weather.delay + self.dice.random() * weather.jitter
                heapq.heappush(late, (due, self.carried, across[source], packet))
            while late and late[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(late)
                with contextlib.suppress(OSError):  # its queue is full, as a wire's may be
                    os.write(target, packet)

    def end(self) -> None:
        """Carry nothing any more."""
        self._ends.set()


@contextlib.contextmanager
def wired(seed: int) -> Iterator[Wire]:
    """Two hosts and the wire between them; all else that they send goes nowhere. Raises `NoNamespaces`."""
    if os.geteuid():
        raise NoNamespaces("network namespaces take root")
    tag = os.getpid()
    hosts = (Wired(f"chaos-{tag}-a", "10.78.0.1"), Wired(f"chaos-{tag}-b", "10.78.0.2"))
    with contextlib.ExitStack() as stack:
        try:
            devices = [
                _host(host, f"chaos{tag % 100_000}{side}", stack)
                for host, side in zip(hosts, "ab", strict=True)
            ]
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoNamespaces(f"no namespaces with TUN devices can be made here: {error}") from None
        wire = Wire(hosts, (devices[0], devices[1]), random.Random(seed))
        thread = threading.Thread(target=wire.run, name="wire", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(wire.end)
        yield wire


def _host(host: Wired, device: str, stack: contextlib.ExitStack) -> int:
    _ip("netns", "add", host.name)
    stack.callback(_ip, "netns", "del", host.name)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    stack.callback(os.close, tun)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
    _ip("link", "set", device, "netns", host.name)
    for words in (
        ("addr", "add", f"{host.address}/24", "dev", device),
        ("link", "set", device, "up"),
        ("link", "set", "lo", "up"),
        ("route", "add", "default", "dev", device),
    ):
        _ip("-n", host.name, *words)
    return tun


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
