"""What the machine and the bare engines do: a plain copy between devices, and NIXL and Mooncake in pieces of 16 MiB.

    python3 -m benchmarks.gpu.ceilings WHAT SOURCE TARGET BYTES

WHAT is copy, nixl or mooncake; SOURCE and TARGET are device numbers, or cpu for both. One JSON object goes to stdout,
on a line of its own that begins with `RESULT`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

PIECE = 16 << 20
ROUNDS = 8


def main() -> None:
    """Measure one of them and print."""
    what, source, target, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    found = {"copy": _copy, "nixl": _nixl, "mooncake": _mooncake}[what](source, target, size)
    sys.stdout.write(f"\nRESULT {json.dumps({'ceiling': what, 'bytes': size, **found})}\n")
    sys.stdout.flush()
    # Destructors of engines that other processes still know are of no interest here.
    os._exit(0)


def _copy(source: str, target: str, size: int) -> dict[str, Any]:
    import torch

    here, there = _tensor(source, size), _tensor(target, size)

    def copy() -> None:
        there.copy_(here)
        if source != "cpu":
            torch.cuda.synchronize(there.device)
            torch.cuda.synchronize(here.device)

    return _timed(copy, size)


def _nixl(source: str, target: str, size: int) -> dict[str, Any]:
    """The target reads from another process."""
    return _between(_nixl_source, _nixl_target, source, target, size)


def _mooncake(source: str, target: str, size: int) -> dict[str, Any]:
    """The target reads from another process."""
    return _between(_mooncake_source, _mooncake_target, source, target, size)


def _between(
    serve: Callable[[Connection, str, int], None],
    read: Callable[[dict[str, Any], str, int], dict[str, Any]],
    source: str,
    target: str,
    size: int,
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, source, size), daemon=True)
    process.start()
    if not ours.poll(90.0):
        raise SystemExit("the other process says nothing")
    found = read(ours.recv(), target, size)
    process.kill()
    return found


def _nixl_agent(name: str, device: str, size: int) -> tuple[Any, Any, str, int]:
    tensor = _tensor(device, size)
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    kind, number = ("DRAM", 0) if device == "cpu" else ("VRAM", int(device))
    agent.register_memory([(tensor.data_ptr(), size, number, "")], kind)
    return agent, tensor, kind, number


def _nixl_source(pipe: Connection, device: str, size: int) -> None:
    agent, tensor, kind, number = _nixl_agent("source", device, size)
    pipe.send(
        {
            "metadata": agent.get_agent_metadata(),
            "address": tensor.data_ptr(),
            "kind": kind,
            "number": number,
        }
    )
    while True:
        agent.get_new_notifs()
        time.sleep(0.001)


def _nixl_target(there: dict[str, Any], device: str, size: int) -> dict[str, Any]:
    agent, tensor, kind, number = _nixl_agent("target", device, size)
    tensor.fill_(-1)
    name = agent.add_remote_agent(there["metadata"])
    offsets = range(0, size, PIECE)
    mine = agent.get_xfer_descs([(tensor.data_ptr() + at, PIECE, number) for at in offsets], kind)
    theirs = agent.get_xfer_descs(
        [(there["address"] + at, PIECE, there["number"]) for at in offsets], there["kind"]
    )
    handle = agent.initialize_xfer("READ", mine, theirs, name)

    def read() -> None:
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            if device == "cpu":
                time.sleep(50e-6)
            state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise SystemExit("the transfer failed")

    return _timed(read, size) | {"right": _right(tensor)}


def _mooncake_engine(device: str, size: int) -> tuple[Any, Any]:
    tensor = _tensor(device, size)
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp" if device == "cpu" else "nvlink_intra", ""):
        raise SystemExit("the engine did not start")
    if engine.register_memory(tensor.data_ptr(), size):
        raise SystemExit("the memory was not registered")
    return engine, tensor


def _mooncake_source(pipe: Connection, device: str, size: int) -> None:
    engine, tensor = _mooncake_engine(device, size)
    pipe.send({"session": f"127.0.0.1:{engine.get_rpc_port()}", "address": tensor.data_ptr()})
    while True:
        time.sleep(1.0)


def _mooncake_target(there: dict[str, Any], device: str, size: int) -> dict[str, Any]:
    engine, tensor = _mooncake_engine(device, size)
    tensor.fill_(-1)
    offsets = range(0, size, PIECE)
    mine = [tensor.data_ptr() + at for at in offsets]
    theirs = [there["address"] + at for at in offsets]

    def read() -> None:
        if engine.batch_transfer_sync_read(there["session"], mine, theirs, [PIECE] * len(mine)):
            raise SystemExit("the transfer failed")

    return _timed(read, size) | {"right": _right(tensor)}


def _tensor(device: str, size: int) -> Any:
    """Memory that holds the number of each 8 bytes."""
    import torch

    if device != "cpu":
        torch.cuda.set_device(int(device))
    where = "cpu" if device == "cpu" else f"cuda:{device}"
    return torch.arange(size // 8, dtype=torch.int64, device=where)


def _right(tensor: Any) -> bool:
    import torch

    return bool((tensor == torch.arange(len(tensor), dtype=torch.int64, device=tensor.device)).all())


def _timed(work: Callable[[], None], size: int) -> dict[str, Any]:
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    first, *rest = seconds
    return {"first": first, "seconds": median(rest), "best": min(rest), "gb_per_s": size / median(rest) / 1e9}


if __name__ == "__main__":
    main()
