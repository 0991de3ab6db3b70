"""Liveness: a client's process (pidfd) and its heartbeats say whether it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.service.config import LivenessSettings
from kvd.service.engines.local_engine import Client
from kvd.service.engines.registry import Registry
from kvd.service.slices import SLICE_SECONDS

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1
AWAY_SECONDS = 2.5
"""After so long without a word of it a worker at another kvd is gone: its host, its kvd or the way there is."""
SHARE_OF_DESCRIPTORS = 4
"""Of all descriptors that this process may have, one in so many may watch a process; connections need the others."""


@dataclass(slots=True)
class _Process:
    """One watched process and the incarnations that live in it."""

    pidfd: int
    incarnations: set[str] = field(default_factory=set)


class Liveness:
    """Watches the clients of a registry. Where the kernel shows no process, heartbeats alone decide.

    Whatever many clients may do at once, such as to end or to fall silent, is dealt with in slices.
    """

    def __init__(self, registry: Registry, settings: LivenessSettings) -> None:
        self.settings = settings
        self._registry = registry
        self._processes: dict[int, _Process] = {}
        self._ticked = time.monotonic()
        self._ending: deque[tuple[str, int]] = deque()
        self._fading: OrderedDict[str, Client] = OrderedDict()
        """Silent ones whose processes are not watched, in the order in which they were heard of last."""
        self._afar: dict[str, Client] = {}
        """Workers of engines here that are at other kvds, which watch their processes."""
        self._most_watched = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE_OF_DESCRIPTORS

    def watch(self, client: Client) -> None:
        """Watch the client's process, where the kernel shows it; one at another kvd by that one's word."""
        if client.at is not None:
            self._afar[client.incarnation] = client
        pid = client.process
        if pid <= 0:
            return
        process = self._processes.get(pid)
        if process is None:
            if len(self._processes) >= self._most_watched:
                log.info(
                    "process %d is not watched, %d are already: its heartbeats decide",
                    pid,
                    self._most_watched,
                )
                return
            try:
                process = self._processes[pid] = _Process(os.pidfd_open(pid))
            except ProcessLookupError:
                self._end_soon([client.incarnation], pid)
                return
            except OSError as error:
                log.info("process %d cannot be watched (%s): its heartbeats decide", pid, error.strerror)
                return
            asyncio.get_running_loop().add_reader(process.pidfd, self._ended, pid)
        process.incarnations.add(client.incarnation)

    def unwatch(self, client: Client) -> None:
        """The client is gone: stop watching its process, unless others live in it."""
        self._afar.pop(client.incarnation, None)
        process = self._processes.get(client.process)
        if process is not None:
            process.incarnations.discard(client.incarnation)
            if not process.incarnations:
                self._drop(client.process)

    def watched(self, client: Client) -> bool:
        """Whether the client's process is watched, here or by the kvd that it is at."""
        process = self._processes.get(client.process)
        if client.at is not None:
            return True
        return process is not None and client.incarnation in process.incarnations

    async def run(self) -> None:
        """Look after all clients every 0.1 s until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self.tick(time.monotonic())

    async def tick(self, now: float) -> None:
        """Judge clients by the age of their last sign of life, those that were not heard of for longest first."""
        late = now - self._ticked - TICK_SECONDS
        if late > self.settings.heartbeat_seconds:
            self._registry.roster.pardon(late, now)  # we did not run, so we could not hear
        ends = time.monotonic() + SLICE_SECONDS
        for client in self._registry.roster.unheard(now - self.settings.silent_seconds):
            self._registry.silence(client, f"no heartbeat for {now - client.last_heard:.1f} s")
            if not self.watched(client):
                self._fading[client.incarnation] = client
                self._fading.move_to_end(client.incarnation)
            if time.monotonic() >= ends:
                await asyncio.sleep(0)
                ends = time.monotonic() + SLICE_SECONDS
        for client in [client for client in self._afar.values() if now - client.last_heard > AWAY_SECONDS]:
            self._registry.end(
                client, f"the kvd at {client.at} has not spoken of it for {now - client.last_heard:.1f} s"
            )
        while self._fading:
            incarnation, client = next(iter(self._fading.items()))
            silent = client.state == "silent" and self._registry.clients.get(incarnation) is client
            if silent and now - client.last_heard <= self.settings.gone_seconds:
                break
            del self._fading[incarnation]
            if silent:
                self._registry.end(client, f"no heartbeat for {now - client.last_heard:.1f} s")
            if time.monotonic() >= ends:
                await asyncio.sleep(0)
                ends = time.monotonic() + SLICE_SECONDS
        self._registry.forget(time.time() - self.settings.remember_seconds)
        self._ticked = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._processes):
            self._drop(pid)

    def _ended(self, pid: int) -> None:
        incarnations = self._processes[pid].incarnations
        self._drop(pid)
        self._end_soon(incarnations, pid)

    def _end_soon(self, incarnations: Iterable[str], pid: int) -> None:
        if not self._ending:
            asyncio.get_running_loop().call_soon(self._end_some)
        self._ending.extend((incarnation, pid) for incarnation in incarnations)

    def _end_some(self) -> None:
        """A process may have had thousands of clients, and thousands of processes may end at once."""
        ends = time.monotonic() + SLICE_SECONDS
        try:
            while self._ending and time.monotonic() < ends:
                incarnation, pid = self._ending.popleft()
                client = self._registry.clients.get(incarnation)
                if client is not None and client.process == pid:
                    self._registry.end(client, f"process {pid} ended", ended=True)
        finally:  # also after an error: nothing else would go on with the others
            if self._ending:
                asyncio.get_running_loop().call_soon(self._end_some)

    def _drop(self, pid: int) -> None:
        process = self._processes.pop(pid)
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
