"""Owners that are stopped, killed or closed, and ones that are set up otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import torch

from benchmarks.gpu_direct.owner import MIB, Owner, fill, owner, regions, tensors
from benchmarks.gpu_direct.reader import Reader, finished, timed, wait
from benchmarks.gpu_direct.shapes import pieces
from kvd.backends.contract import State
from kvd.backends.direct.backend import DirectBackend, DirectOptions
from kvd.backends.errors import BackendError


def ends(reader: Reader, device: str) -> dict[str, Any]:
    """The owner is stopped, closes its backend, or is killed with copies in flight."""
    result: dict[str, Any] = {}
    with owner(device) as peer:
        lane = reader.lane(peer)
        selection = pieces(reader, peer, 64 << 10, 8192)
        rows = selection.descriptors()
        os.kill(peer.process.pid, signal.SIGSTOP)
        reader.clear()
        finished(lane, lane.submit_selection("p", selection))
        result["stopped_wrong_bytes"] = reader.wrong(peer, rows)
        os.kill(peer.process.pid, signal.SIGCONT)
        reader.clear()
        flights = [lane.submit_selection("p", selection) for _ in range(100)]
        peer.process.kill()
        pending = lane.poll(flights[-1]) is State.PENDING
        result["killed_in_flight"] = pending
        peer.process.wait()
        result["states_after_kill"] = sorted({wait(lane, f).state.value for f in flights})
        result["killed_wrong_bytes"] = reader.wrong(peer, rows)
        try:
            lane.submit_selection("p", selection)
            result["submit_after_death"] = "accepted"
        except BackendError as error:
            result["submit_after_death"] = f"{type(error).__name__}: {error}"
        free = torch.cuda.mem_get_info(device)[0]
        lane.close()
        result["mib_free_by_closing"] = (torch.cuda.mem_get_info(device)[0] - free) // MIB
    with owner(device) as peer:
        lane = reader.lane(peer)
        selection = pieces(reader, peer, 64 << 10, 8192)
        flights = [lane.submit_selection("p", selection) for _ in range(20)]
        began = time.perf_counter()
        lane.close()
        result["close_under_20_copies_ms"] = round((time.perf_counter() - began) * 1e3, 2)
        result["states_after_close"] = sorted({f.state.value for f in flights})
        lane = reader.lane(peer)
        transfer = lane.submit_selection("p", selection)
        peer.order("close")
        result["home_closed"] = f"{wait(lane, transfer).state.value}: {transfer.reason}"
        lane.close()
    return result


def one_read(reader: Reader, peer: Owner) -> dict[str, Any]:
    """A lane, one checked copy, and its speed."""
    lane = reader.lane(peer)
    selection = pieces(reader, peer, 64 << 10, 8192)
    reader.clear()
    finished(lane, lane.submit_selection("p", selection))
    wrong = reader.wrong(peer, selection.descriptors())
    result = {"wrong_bytes": wrong, **timed(lane, selection)}
    lane.close()
    return result


def from_another(reader: Reader, device: str, **environ: str) -> dict[str, Any]:
    """`one_read` of an owner with other settings."""
    with owner(device, **environ) as peer:
        return one_read(reader, peer)


def from_itself(reader: Reader) -> dict[str, Any]:
    """A backend and a lane in one process."""
    memory = tensors(reader.device)
    fill(memory)
    backend = DirectBackend("itself", DirectOptions())
    backend.register(regions(memory))
    peer = Owner(subprocess.Popen(["true"], text=True), backend.metadata(), [t.data_ptr() for t in memory])
    peer.process.wait()
    try:
        return one_read(reader, peer)
    finally:
        backend.close()
