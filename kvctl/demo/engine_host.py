"""Runs one vLLM engine in a process tree of its own: the child's side of kvctl.demo.engine.

Started as `python -m kvctl.demo.engine_host COMMANDS EVENTS LIFELINE THROWAWAY ENGINE`: three inherited file
descriptors, a folder to remove at the end or nothing, vLLM's arguments in JSON. The process splits in two before it
imports anything heavy. The host runs vLLM's front end. The guardian waits until its parent ends (seen as end-of-file on
LIFELINE) or the host ends, and then kills what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pkgutil
import select
import shutil
import signal
import sys
import time
import traceback
from typing import Any

from kvctl.processes.tied import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from kvctl.processes.tree import kill_children

HostMessage = dict[str, Any]


def main(commands: int, events: int, lifeline: int, throwaway: str, arguments: HostMessage) -> int:
    """Become a guardian and a host; return the exit status of whichever of the two this process now is."""
    parent = os.getppid()
    host = os.fork()
    if host:
        os.close(commands)
        os.close(events)
        return guard(host, lifeline, parent, throwaway)
    os.close(lifeline)
    # Should the guardian be killed, the host must not outlive it.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return asyncio.run(Host(events).run(arguments, commands))


def guard(host: int, lifeline: int, parent: int, throwaway: str) -> int:
    """Wait for the end of the parent or of the host, then end everything below this process.

    Returns:
        The host's exit status, 128 + N if signal N ended it.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    watched = [lifeline, os.pidfd_open(host)]
    # The parent's id is looked at too: a process that the parent forked meanwhile may hold LIFELINE open.
    while not select.select(watched, [], [], 0.5)[0] and os.getppid() == parent:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(host, signal.SIGKILL)
    _, status = os.waitpid(host, 0)
    kill_children()
    if throwaway:
        shutil.rmtree(throwaway, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class Host:
    """The engine and the conversation about it; everything happens on one event loop."""

    def __init__(self, events: int) -> None:
        """Write messages to the file descriptor `events`."""
        self._events = os.fdopen(events, "w", buffering=1, encoding="utf-8")
        self._engine: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, arguments: HostMessage, commands: int) -> int:
        """Start the engine and serve commands until told to stop; return an exit status if it did not start."""
        started = time.monotonic()
        try:
            self._engine = make_engine(arguments)
            await self._engine.check_health()
        except BaseException as error:  # noqa: BLE001 - vLLM also gives up with SystemExit
            traceback.print_exc()
            self._say(event="failed", error=f"{type(error).__name__}: {error}")
            return 1
        self._say(event="ready", seconds=time.monotonic() - started)
        reader = asyncio.StreamReader(limit=1 << 26)
        pipe = os.fdopen(commands, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        while line := await reader.readline():
            command = json.loads(line)
            if command["do"] == "stop":
                break
            task = asyncio.create_task(self._serve(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._engine.shutdown()
        # Past this point there are only destructors of half torn-down libraries to run.
        os._exit(0)

    async def _serve(self, command: HostMessage) -> None:
        match command["do"]:
            case "submit":
                self._say(event="answer", id=command["id"], **await answer(self._engine, command))
            case "call":
                self._say(event="value", id=command["id"], **await self._called(command))

    async def _called(self, command: HostMessage) -> HostMessage:
        """What a function of any module gives for the engine."""
        try:
            function = pkgutil.resolve_name(command["function"])
            return {"error": "", "value": await function(self._engine, *command["arguments"])}
        except Exception as raised:  # noqa: BLE001 - the asker is told
            return {"error": f"{type(raised).__name__}: {raised}"}

    def _say(self, **message: Any) -> None:
        self._events.write(json.dumps(message) + "\n")


async def answer(engine: Any, command: HostMessage, lora: Any = None) -> HostMessage:
    """Run one request to its end, with a LoRARequest if any; what goes wrong with it alone is part of the answer."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": command["kv_transfer_params"], "first_token": command["first_token"]}
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=command["max_tokens"],
        ignore_eos=True,
        extra_args={name: value for name, value in extra.items() if value is not None} or None,
    )
    begun = time.monotonic()
    first: float | None = None
    last: Any = None
    error = ""
    try:
        prompt = {"prompt_token_ids": command["prompt_token_ids"]}
        async for output in engine.generate(prompt, sampling, command["id"], lora_request=lora):
            last = output
            if first is None and output.outputs[0].token_ids:
                first = time.monotonic() - begun
    except Exception as raised:  # noqa: BLE001 - any failure of a request is its answer
        error = f"{type(raised).__name__}: {raised}"
    completion = last.outputs[0] if last is not None else None
    if completion is not None and completion.finish_reason == "error":
        error = error or "the engine ended the request with an error"
    return {
        "request_id": command["id"],
        "token_ids": list(completion.token_ids) if completion is not None else [],
        "kv_transfer_params": last.kv_transfer_params if last is not None else None,
        "num_cached_tokens": last.num_cached_tokens if last is not None else None,
        "finish_reason": completion.finish_reason if completion is not None else None,
        "first_token_seconds": first,
        "total_seconds": time.monotonic() - begun,
        "error": error,
    }


def make_engine(arguments: HostMessage) -> Any:
    """Start vLLM's asynchronous engine with these of its own arguments."""
    from vllm.config import KVTransferConfig
    from vllm.distributed import utils
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if "kv_transfer_config" in arguments:
        arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    config = AsyncEngineArgs(**({"enforce_eager": True, "seed": 0} | arguments)).create_engine_config()
    # On CPU vLLM starts its processes as fresh interpreters, each of which imports torch and vLLM again: two thirds
    # of the time to start. The reason is the binding of OpenMP threads to cores, which the environment turns off.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    # For a second after each message vLLM's processes wait for the next one in a loop of sched_yield. Where they share
    # a few cores, that kept all others off them for seconds (docs/connector.md). Without it they sleep for an instant.
    utils.USE_SCHED_YIELD = False
    return AsyncLLM.from_vllm_config(config)


if __name__ == "__main__":
    commands, events, lifeline = map(int, sys.argv[1:4])
    sys.exit(main(commands, events, lifeline, sys.argv[4], json.loads(sys.argv[5])))
