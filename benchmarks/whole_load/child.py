"""A process that is asked by another one, over a socket: every answer within a time, every error as its text."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

_START_S = 120.0


class Child:
    """A module started as a process of its own, with ``code`` in front of the Python path."""

    def __init__(self, module: str, code: Path, folder: Path, *arguments: str) -> None:
        """Start it; the first `ask` waits until it is there."""
        self._module = module
        self._pipe: Connection | None = None
        address = str(folder / f"{module.rpartition('.')[2]}-{id(self):x}")
        path = os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")])
        self._listener = Listener(address, "AF_UNIX")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, address, *arguments], env={**os.environ, "PYTHONPATH": path}
        )

    def _connected(self) -> Connection:
        until = time.monotonic() + _START_S
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # noqa: SLF001 - it has no other way
        while self._pipe is None:
            try:
                self._pipe = self._listener.accept()
            except OSError as error:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{self._module} did not start: {error}") from None
        return self._pipe

    def ask(self, what: str, seconds: float = 60.0, **arguments: Any) -> Any:
        """Have it do something. Raises RuntimeError with its error, or where it does not answer in time."""
        pipe = self._connected()
        try:
            pipe.send((what, arguments))
            if not pipe.poll(seconds):
                self.end()  # what it would answer later is no answer to what is asked next
                raise RuntimeError(f"no answer to {what} within {seconds} s")
            answer, trouble = pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{self._module} ended: {type(error).__name__} {error}") from None
        if trouble:
            raise RuntimeError(trouble)
        return answer

    def end(self) -> None:
        """Kill it: what it holds goes with it."""
        self.process.kill()
        self.process.wait()
        self._listener.close()


def serve(address: str, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer until nobody asks any more."""
    with Client(address, "AF_UNIX") as pipe:
        while True:
            try:
                what, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((answers[what](**arguments), ""))
            except Exception:  # noqa: BLE001 - whoever asked decides
                pipe.send((None, traceback.format_exc()[-1500:]))
