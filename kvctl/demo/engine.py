"""Runs one vLLM engine in a process tree of its own and talks to it: the parent's side.

The tree is: *guardian* (a small process that outlives nobody), *host* (vLLM's front end, kvctl.demo.engine_host),
*core* (scheduler, and the worker where there is only one) and, with tensor parallelism, *workers*. Commands go to
the host as JSON lines over a pipe, answers come back over another; whatever libraries print goes to a log file.
When this process ends, however it ends, the guardian sees its end of a pipe close and kills the tree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvctl.demo.engine_spec import EngineSpec, engine_arguments, environment
from kvctl.processes.errors import EngineGone, EngineStartFailed, EngineTimeout
from kvctl.processes.spawn import Spawn, Spawned, log_tail, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

# A Unix socket's path may have 107 bytes. vLLM appends a UUID to its folder (37), Python's multiprocessing two names.
LONGEST_SOCKET_FOLDER = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """What an engine said to one request.

    Attributes:
        request_id: the id the request was submitted under.
        token_ids: the generated tokens; fewer than asked for when the request was aborted or failed.
        kv_transfer_params: what the connector wants handed to the next engine, or None.
        num_cached_tokens: prompt tokens that were not computed here (prefix cache or transfer), or None.
        finish_reason: `length`, `abort`, `error`, or None when the request raised.
        first_token_seconds: from submission to the first token, or None without one.
        total_seconds: from submission to the end.
        error: empty, or why there is no complete answer.
    """

    request_id: str
    token_ids: tuple[int, ...]
    kv_transfer_params: Mapping[str, Any] | None
    num_cached_tokens: int | None
    finish_reason: str | None
    first_token_seconds: float | None
    total_seconds: float
    error: str


class EngineProcess:
    """A running engine; made by `start`, ended by `stop`.

    All methods may be called from any thread.
    """

    def __init__(self, spec: EngineSpec, process: Spawned, commands: int, events: int, lifeline: int) -> None:
        """Use `EngineProcess.start`. The last three are this end of the pipes to the tree."""
        self.spec = spec
        self._process = process
        self._commands = os.fdopen(commands, "w", buffering=1, encoding="utf-8")
        self._lifeline = lifeline
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._ready: Future[dict[str, Any]] = Future()
        self._pending: dict[str, Future[Any]] = {}
        self._stopped = False
        self._reader = threading.Thread(
            target=self._read, args=(events,), name=f"engine-{process.pid}", daemon=True
        )
        self._reader.start()

    @classmethod
    def start(cls, spec: EngineSpec, spawn: Spawn = spawn) -> Self:
        """Begin starting an engine and return at once; `wait_ready` tells how it went. ``spawn`` starts its tree."""
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        sockets = _socket_folder(spec.work_dir)
        throwaway = "" if sockets.parent == spec.work_dir else str(sockets)
        arguments = json.dumps(engine_arguments(spec))
        commands_read, commands_write = os.pipe()
        events_read, events_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        theirs = (commands_read, events_write, lifeline_read)
        try:
            process = spawn(
                # -P: the work folder is the current one and must not become a place to import from.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kvctl.demo.engine_host",
                    *map(str, theirs),
                    throwaway,
                    arguments,
                ],
                spec.log_path,
                environment(spec, sockets),
                cwd=spec.work_dir,
                pass_fds=theirs,
            )
        except OSError:
            for descriptor in (commands_write, events_read, lifeline_write):
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return cls(spec, process, commands_write, events_read, lifeline_write)

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Wait until the engine takes requests.

        Raises:
            EngineStartFailed: it died or refused its configuration; the message ends with its log.
            EngineTimeout: it is still starting after `timeout` seconds.
        """
        try:
            self._ready.result(timeout)
        except TimeoutError:
            message = f"the engine is not ready after {timeout:g} s{log_tail(self.spec.log_path)}"
            raise EngineTimeout(message) from None

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        first_token: int | None = None,
    ) -> Future[EngineAnswer]:
        """Send a prompt for greedy decoding of exactly `max_tokens` tokens, the first of which may be given.

        The future raises EngineGone when the engine dies first; a request that fails alone gives an Answer with
        `error` set.
        """
        name = request_id or f"request-{next(self._numbers)}"
        return self._ask(
            name,
            do="submit",
            prompt_token_ids=list(prompt_token_ids),
            max_tokens=max_tokens,
            kv_transfer_params=None if kv_transfer_params is None else dict(kv_transfer_params),
            first_token=first_token,
        )

    def call(self, function: str, *arguments: Any) -> Future[Any]:
        """Run the coroutine function `MODULE:NAME` in the engine's host, on vLLM's engine and these arguments.

        Arguments and answer are what JSON takes. What it raises is a RuntimeError of the future, with its words.
        """
        return self._ask(f"call-{next(self._numbers)}", do="call", function=function, arguments=arguments)

    def submit_alone(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Future[EngineAnswer]:
        """Ask for the same as `submit`, computed in the pieces of a hand-over; needs `forced_first_tokens`.

        The answer's first token is the prompt's last one: `max_tokens` more follow it.
        """
        *most, last = prompt_token_ids
        return self.submit(most, max_tokens + 1, first_token=last)

    def stop(self, timeout: float = 20.0) -> None:
        """End the engine: in order if it manages within `timeout` seconds, else by force. Nothing of it remains."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        with contextlib.suppress(OSError, ValueError):
            self._commands.write('{"do": "stop"}\n')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        # The guardian kills the rest of the tree once this end of the pipe is closed.
        os.close(self._lifeline)
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(OSError):
            self._commands.close()

    def _ask(self, name: str, **command: Any) -> Future[Any]:
        future: Future[Any] = Future()
        line = json.dumps({"id": name, **command}) + "\n"
        with self._lock:
            if name in self._pending:
                message = f"request id {name!r} is already in use"
                raise ValueError(message)
            self._pending[name] = future
            try:
                self._commands.write(line)
            except (OSError, ValueError) as error:
                del self._pending[name]
                message = f"the engine takes no commands any more ({error}){log_tail(self.spec.log_path)}"
                raise EngineGone(message) from error
        return future

    def _read(self, events: int) -> None:
        """Resolve futures from the host's messages until its end of the pipe is closed; runs in its own thread."""
        with os.fdopen(events, encoding="utf-8") as lines:
            for line in lines:
                self._handle(json.loads(line))
        self._process.wait()
        message = f"the engine ended with status {self._process.returncode}{log_tail(self.spec.log_path)}"
        if not self._ready.done():
            self._ready.set_exception(EngineStartFailed(message))
        with self._lock:
            orphans = list(self._pending.values())
            self._pending.clear()
        for future in orphans:
            future.set_exception(EngineGone(message))

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "ready":
            self._ready.set_result(event)
            return
        if kind == "failed":
            self._ready.set_exception(EngineStartFailed(f"{event['error']}{log_tail(self.spec.log_path)}"))
            return
        with self._lock:
            future = self._pending.pop(event.pop("id"), None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if kind == "answer":
            event["token_ids"] = tuple(event["token_ids"])
            future.set_result(EngineAnswer(**event))
        elif event["error"]:
            future.set_exception(RuntimeError(event["error"]))
        else:
            future.set_result(event["value"])


def _socket_folder(work_dir: Path) -> Path:
    """A folder for Unix sockets and temporary files: in the work folder, or a throwaway one if that path is long."""
    folder = work_dir / "tmp"
    if len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER:
        folder.mkdir(exist_ok=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="kvctl-"))
