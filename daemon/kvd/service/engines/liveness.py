"""Liveness: a client's process (pidfd) and its heartbeats say whether it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field

from kvd.service.config import LivenessSettings
from kvd.service.engines.local_engine import Client
from kvd.service.engines.registry import Registry

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1


@dataclass(slots=True)
class _Process:
    """One watched process and the incarnations that live in it."""

    pidfd: int
    incarnations: set[str] = field(default_factory=set)


class Liveness:
    """Watches the clients of a registry. Where the kernel shows no process, heartbeats alone decide."""

    def __init__(self, registry: Registry, settings: LivenessSettings) -> None:
        self.settings = settings
        self._registry = registry
        self._processes: dict[int, _Process] = {}
        self._ticked = time.monotonic()

    def watch(self, client: Client, pid: int) -> None:
        """Watch process ``pid``, which the kernel says is at the socket's other end (0: not visible to us)."""
        if pid <= 0:
            return
        process = self._processes.get(pid)
        if process is None:
            try:
                process = self._processes[pid] = _Process(os.pidfd_open(pid))
            except ProcessLookupError:
                asyncio.get_running_loop().call_soon(self._process_ended, client, pid)
                return
            except OSError as error:
                log.info("process %d cannot be watched (%s): its heartbeats decide", pid, error.strerror)
                return
            asyncio.get_running_loop().add_reader(process.pidfd, self._ended, pid)
        process.incarnations.add(client.incarnation)

    def unwatch(self, client: Client) -> None:
        """The client is gone: stop watching its process, unless others live in it."""
        for pid, process in list(self._processes.items()):
            process.incarnations.discard(client.incarnation)
            if not process.incarnations:
                self._drop(pid)

    def watched(self, client: Client) -> bool:
        """Whether the client's process is watched."""
        return any(client.incarnation in process.incarnations for process in self._processes.values())

    async def run(self) -> None:
        """Look at all clients every 0.1 s until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Judge all clients by the age of their last sign of life."""
        late = now - self._ticked - TICK_SECONDS
        self._ticked = now
        for client in list(self._registry.clients.values()):
            if client.state == "gone":
                continue
            if late > self.settings.heartbeat_seconds:
                client.heard = min(now, client.heard + late)  # we did not run, so we could not hear
            age = now - client.heard
            if age > self.settings.gone_seconds and not self.watched(client):
                self._registry.end(client, f"no heartbeat for {age:.1f} s")
            elif age > self.settings.silent_seconds:
                self._registry.silence(client, f"no heartbeat for {age:.1f} s")
        self._registry.forget(time.time() - self.settings.remember_seconds)

    def close(self) -> None:
        """Stop watching."""
        for pid in list(self._processes):
            self._drop(pid)

    def _ended(self, pid: int) -> None:
        incarnations = tuple(self._processes[pid].incarnations)
        self._drop(pid)
        for incarnation in incarnations:
            if client := self._registry.clients.get(incarnation):
                self._process_ended(client, pid)

    def _process_ended(self, client: Client, pid: int) -> None:
        self._registry.end(client, f"process {pid} ended", ended=True)

    def _drop(self, pid: int) -> None:
        process = self._processes.pop(pid)
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
