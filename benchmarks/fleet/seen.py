"""What the kvds of a fleet published, by host: read by one thread, with the time that each kvd gave it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import zmq

from benchmarks.fleet import slow_clock
from benchmarks.fleet.hosts import Host
from kvd.wire.event import KvdEvent
from kvd.wire.names import events_address

_EVENT = msgspec.msgpack.Decoder(KvdEvent)


class Seen(NamedTuple):
    """An event: which host's kvd published it, and when, by the fleet's clock in Unix seconds."""

    host: int
    kind: str
    subject: str
    time: float


class Watch:
    """Events of these kinds, of all hosts, from now on. Use it in a ``with``."""

    def __init__(self, hosts: Sequence[Host], kinds: Sequence[str]) -> None:
        self.events: list[Seen] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, len(hosts) + 16)
        self._poller = zmq.Poller()
        self._host: dict[zmq.Socket[bytes], int] = {}
        self._ends = threading.Event()
        for host in hosts:
            opened = self._context.socket(zmq.SUB)
            opened.linger, opened.rcvhwm = 0, 0
            for kind in kinds:
                opened.subscribe(kind)
            opened.connect(events_address(host.directory))
            self._poller.register(opened, zmq.POLLIN)
            self._host[opened] = host.number
        self._thread = threading.Thread(target=self._read, name="events", daemon=True)

    def until(self, enough: Callable[[list[Seen]], bool], seconds: float) -> bool:
        """Wait until what was seen is enough, at most ``seconds`` on the wall; whether it is."""
        ends = slow_clock.wall() + seconds
        while not (found := enough(self.events)) and slow_clock.wall() < ends:
            slow_clock.pause(0.1)
        return found

    def _read(self) -> None:
        while not self._ends.is_set():
            for opened, _ in self._poller.poll(200):
                host = self._host[opened]
                try:
                    while True:
                        event = _EVENT.decode(opened.recv_multipart(zmq.NOBLOCK)[-1])
                        self.events.append(Seen(host, event.kind, event.subject, event.time))
                except zmq.Again:
                    continue
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
