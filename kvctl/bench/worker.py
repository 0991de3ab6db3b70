"""One of the two processes that KV moves between: `python -m kvctl.processes.tied PARENT kvctl.bench.worker`.

One is the reader, with one worker's memory; the other the source, with that of all workers that it reads from. Commands
come as JSON lines on stdin, one JSON line on stdout answers each. Reads are posted by the reader, writes by the source.
"""

from __future__ import annotations

import functools
import threading
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvctl.bench import ceilings, device, pattern
from kvctl.bench.cases import from_plain
from kvctl.bench.memory import Memory, anonymous, place
from kvctl.bench.moving import SOURCE, LoadMover, WriteMover, move
from kvctl.processes.commands import Handlers, JsonCommand, JsonResult, serve
from kvd.backends.contract import Backend, Lane, Operation, Window, WindowBackend
from kvd.backends.direct.memfd import memfd
from kvd.backends.registry import maps_memory, open_backend
from kvd.geometry.codec import worker_from_plain, worker_to_plain
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.topology.plan import plan_worker
from kvd.topology.transfer_topology import TransferTopology

SERVE_SECONDS = 200e-6


@dataclass(slots=True)
class Bench:
    """What this process is and has; by position of the worker in its engine, and 0 for the reader.

    ``ends`` closes what is open, last first.
    """

    reads: bool
    memories: dict[int, Memory]
    backends: dict[int, Backend]
    mover: LoadMover | WriteMover | None = None
    lanes: dict[int, Lane] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    stream: ceilings.TcpStream = field(default_factory=ceilings.TcpStream)
    ends: ExitStack = field(default_factory=ExitStack)

    @property
    def reader(self) -> Memory:
        """The one memory of the reading process."""
        return self.memories[0]


def _begin(who: JsonCommand) -> tuple[Bench, JsonResult]:
    """Take memory for the workers and register it: their geometries with real addresses, and metadata, come back."""
    memories = {int(at): _memory(worker_from_plain(plain), who) for at, plain in who["workers"].items()}
    backends: dict[int, Backend] = {}
    for at, memory in memories.items():
        backends[at] = open_backend(who["backend"], f"{who['name']}-{at}", who["options"])
        backends[at].register(memory.geometry.regions)
    bench = Bench(who["reads"], memories, backends)
    for close in (*(backend.close for backend in backends.values()), bench.stream.close):
        bench.ends.callback(close)
    answer: JsonResult = {
        "workers": {at: worker_to_plain(memory.geometry) for at, memory in memories.items()},
        "metadata": {at: _text(backend.metadata()) for at, backend in backends.items()},
        "lands": all(backend.traits.lands for backend in backends.values()),
    }
    return bench, answer


def _memory(worker: WorkerGeometry, who: JsonCommand) -> Memory:
    """Memory as KvdConnector has it: with a backend that maps memory, what others can map."""
    if who["device"] is not None:
        return device.place_on(worker, who["device"])
    mapped = maps_memory(who["backend"], who["options"])
    return place(worker, functools.partial(memfd, "kvctl-bench") if mapped else anonymous)


def _connect(bench: Bench, command: JsonCommand) -> JsonResult:
    """Know the other side: plan, and make the lanes for reading or writing."""
    reader, siblings, sources = (
        [worker_from_plain(plain) for plain in command[name]] for name in ("reader", "siblings", "sources")
    )
    if bench.reads:
        local = _engine("reader", [reader[0] if one.rank == reader[0].rank else one for one in siblings])
        topology = TransferTopology(local, reader[0].rank)
        known = {int(at): b64decode(text) for at, text in command["metadata"].items()}
        metadata = {source.rank: known.get(at, b"") for at, source in enumerate(sources)}
        remote = topology.register_card(SOURCE, "", lambda: _engine(SOURCE, sources), lambda: metadata)
        bench.mover = LoadMover(bench.backends[0], topology)
        bench.ends.callback(bench.mover.close)
        # Its own lane is its thread's; this one is for the ceilings.
        bench.lanes[0] = bench.backends[0].lane(SOURCE)
        for rank, exported in remote.handshake_targets.items():
            bench.lanes[0].add(str(rank), exported)
    else:
        for at, text in command["windows"].items():
            bench.lanes[int(at)] = bench.backends[int(at)].lane("write")
            bench.lanes[int(at)].add("reader", b64decode(text))
        bench.mover = WriteMover(plan_worker(reader[0], siblings, sources), bench.lanes)
    for lane in bench.lanes.values():
        bench.ends.callback(lane.close)
    return {}


def _engine(name: str, workers: Sequence[WorkerGeometry]) -> EngineGeometry:
    """The engine of these workers, which make it complete."""
    tp, pp, dcp = (1 + max(getattr(worker.rank, axis) for worker in workers) for axis in ("tp", "pp", "dcp"))
    return EngineGeometry(name, "", "", tp, pp, dcp, tuple(workers))


def _land(bench: Bench, command: JsonCommand) -> JsonResult:
    """The reader lets each source worker write into its memory; a thread serves the windows."""
    backend = bench.backends[0]
    if not isinstance(backend, WindowBackend):
        raise TypeError("this backend has no windows")
    found = {}
    for at in command["sources"]:
        window = backend.window(f"from-{at}")
        bench.windows.append(window)
        bench.ends.callback(window.close)
        found[at] = _text(window.metadata())
    serving = threading.Thread(target=_serve, args=(bench,), daemon=True)
    serving.start()
    bench.ends.callback(serving.join)
    bench.ends.callback(bench.ended.set)
    return {"windows": found}


def _serve(bench: Bench) -> None:
    while not bench.ended.wait(SERVE_SECONDS):
        for window in bench.windows:
            window.progress()


def _fill(bench: Bench, command: JsonCommand) -> JsonResult:
    for request in map(from_plain, command["requests"]):
        for memory in bench.memories.values():
            pattern.fill(memory, request.source, command["key"] + request.name)
    for memory in bench.memories.values():
        device.put(memory)
    return {}


def _clear(bench: Bench, command: JsonCommand) -> JsonResult:
    for request in map(from_plain, command["requests"]):
        pattern.clear(bench.reader, request.reader)
    device.put(bench.reader)
    return {}


def _check(bench: Bench, command: JsonCommand) -> JsonResult:
    device.get(bench.reader)
    for request in map(from_plain, command["requests"]):
        key = command["key"] + request.name
        difference = pattern.first_difference(bench.reader, request.reader, key, request.tokens)
        if difference:
            return {"difference": f"{request.name}: {difference}"}
    return {"difference": ""}


def _move(bench: Bench, command: JsonCommand) -> JsonResult:
    if bench.mover is None:
        raise RuntimeError("told to move before it paired the other side")
    how = {name: command[name] for name in ("at", "in_flight", "coalesce") if name in command}
    return move(bench.mover, list(map(from_plain, command["requests"])), command["seconds"], **how)


def _raw(bench: Bench, command: JsonCommand) -> JsonResult:
    """One large transfer with the same backend: its seconds and bytes."""
    operation: Operation = "read" if bench.reads else "write"
    at, theirs = int(command["worker"]), worker_from_plain(command["theirs"])
    mine = bench.memories[0 if bench.reads else at].geometry
    lane, peer = (bench.lanes[0], command["peer"]) if bench.reads else (bench.lanes[at], "reader")
    return ceilings.large(lane, peer, mine, theirs, operation, command["bytes"], command["seconds"])


def _memcpy(bench: Bench, command: JsonCommand) -> JsonResult:
    if bench.reader.device is not None:
        return device.copied(bench.reader, command["bytes"])
    return ceilings.memcpy(command["bytes"])


def _listen(bench: Bench, command: JsonCommand) -> JsonResult:
    return {"port": bench.stream.listen(command.get("host", "127.0.0.1"))}


def _stream(bench: Bench, command: JsonCommand) -> JsonResult:
    return bench.stream.receive((command["host"], command["port"]), command["bytes"])


def _text(data: bytes) -> str:
    return b64encode(data).decode()


_HANDLERS: Handlers[Bench] = {
    "connect": _connect,
    "land": _land,
    "fill": _fill,
    "clear": _clear,
    "check": _check,
    "move": _move,
    "raw": _raw,
    "memcpy": _memcpy,
    "listen": _listen,
    "stream": _stream,
}


if __name__ == "__main__":
    serve(_begin, _HANDLERS, lambda bench: bench.ends.close())
