"""One of the two processes that KV moves between: `python -m kvctl.processes.tied PARENT kvctl.bench.worker`.

One is the reader, with one worker's memory; the other the source, with that of all workers that it reads from. Orders
come as JSON lines on stdin, one JSON line on stdout answers each. Reads are posted by the reader, writes by the source.
"""

from __future__ import annotations

import functools
import threading
from base64 import b64decode, b64encode
from dataclasses import dataclass, field

from kvctl.bench import ceilings, device, pattern
from kvctl.bench.cases import Request, from_plain
from kvctl.bench.memory import Memory, anonymous, place
from kvctl.bench.moving import Move, move
from kvctl.processes.orders import Deeds, Orders, serve
from kvd.backends.contract import Backend, Lane, Operation, Window, WindowBackend, traits_of
from kvd.backends.direct.host.memory import memfd
from kvd.backends.registry import open_backend
from kvd.geometry.codec import worker_from_plain, worker_to_plain
from kvd.geometry.model import WorkerGeometry
from kvd.topology.plan import Plan, plan_worker

SERVE_SECONDS = 200e-6


@dataclass(slots=True)
class Bench:
    """What this process is and has. ``memories`` of the source are by position of the worker in its engine."""

    reads: bool
    memories: dict[int, Memory]
    backends: dict[int, Backend]
    plan: Plan | None = None
    lanes: dict[str, Lane] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    serving: threading.Thread | None = None
    stream: ceilings.Stream = field(default_factory=ceilings.Stream)

    @property
    def reader(self) -> Memory:
        """The one memory of the reading process."""
        return self.memories[0]


def _begin(who: Orders) -> tuple[Bench, Orders]:
    """Take memory for the workers and register it: their geometries with real addresses, and metadata, come back."""
    memories = {
        int(at): _memory(worker_from_plain(plain), who["backend"], who["device"])
        for at, plain in who["workers"].items()
    }
    backends: dict[int, Backend] = {}
    for at, memory in memories.items():
        backends[at] = open_backend(who["backend"], f"{who['name']}-{at}", who["options"])
        backends[at].register(memory.geometry.regions)
    bench = Bench(who["reads"], memories, backends)
    answer: Orders = {
        "workers": {at: worker_to_plain(memory.geometry) for at, memory in memories.items()},
        "metadata": {at: _text(backend.metadata()) for at, backend in backends.items()},
        "lands": all(backend.traits.lands for backend in backends.values()),
    }
    return bench, answer


def _memory(worker: WorkerGeometry, backend: str, number: int | None) -> Memory:
    """Memory as KvdConnector has it: with direct, what others can map."""
    if number is not None:
        return device.place_on(worker, number)
    return place(worker, functools.partial(memfd, "kvctl-bench") if backend == "direct" else anonymous)


def _meet(bench: Bench, orders: Orders) -> Orders:
    """Know the other side: plan, and make the lanes for reading or writing."""
    reader, siblings, sources = (
        [worker_from_plain(plain) for plain in orders[name]] for name in ("reader", "siblings", "sources")
    )
    bench.plan = plan_worker(reader[0], siblings, sources)
    if bench.reads:
        bench.lanes["read"] = bench.backends[0].lane("read")
        for at, metadata in orders["metadata"].items():
            bench.lanes["read"].add(str(bench.plan.remote_ranks[int(at)]), b64decode(metadata))
    else:
        for at, metadata in orders["windows"].items():
            lane = bench.backends[int(at)].lane("write")
            lane.add("reader", b64decode(metadata))
            bench.lanes[f"write-{at}"] = lane
    return {}


def _land(bench: Bench, orders: Orders) -> Orders:
    """The reader lets each source worker write into its memory; a thread serves the windows."""
    backend = bench.backends[0]
    if not isinstance(backend, WindowBackend):
        raise TypeError("this backend has no windows")
    found = {}
    for at in orders["sources"]:
        window = backend.window(f"from-{at}")
        bench.windows.append(window)
        found[at] = _text(window.metadata())
    bench.serving = threading.Thread(target=_serve, args=(bench,), daemon=True)
    bench.serving.start()
    return {"windows": found}


def _serve(bench: Bench) -> None:
    while not bench.ended.wait(SERVE_SECONDS):
        for window in bench.windows:
            window.progress()


def _fill(bench: Bench, orders: Orders) -> Orders:
    for request in _requests(orders):
        for memory in bench.memories.values():
            pattern.fill(memory, request.source, orders["key"] + request.name)
    for memory in bench.memories.values():
        device.put(memory)
    return {}


def _clear(bench: Bench, orders: Orders) -> Orders:
    for request in _requests(orders):
        pattern.clear(bench.reader, request.reader)
    device.put(bench.reader)
    return {}


def _check(bench: Bench, orders: Orders) -> Orders:
    device.get(bench.reader)
    for request in _requests(orders):
        key = orders["key"] + request.name
        difference = pattern.first_difference(bench.reader, request.reader, key, request.tokens)
        if difference:
            return {"difference": f"{request.name}: {difference}"}
    return {"difference": ""}


def _move(bench: Bench, orders: Orders) -> Orders:
    if bench.plan is None:
        raise RuntimeError("told to move before it met the other side")
    way = Move(
        bench.plan,
        bench.lanes,
        "read" if bench.reads else "write",
        coalesce=orders.get("coalesce", True),
        selection=bench.reads and traits_of(bench.backends[0], bench.lanes["read"]).strided_lists,
        seconds=orders["seconds"],
    )
    return move(way, _requests(orders), orders.get("at"), orders.get("in_flight", 0))


def _raw(bench: Bench, orders: Orders) -> Orders:
    """One large transfer with the same backend: its seconds and bytes."""
    operation: Operation = "read" if bench.reads else "write"
    at, theirs = int(orders["worker"]), worker_from_plain(orders["theirs"])
    mine = bench.memories[0 if bench.reads else at].geometry
    lane, peer = (
        (bench.lanes["read"], orders["peer"]) if bench.reads else (bench.lanes[f"write-{at}"], "reader")
    )
    return ceilings.large(lane, peer, mine, theirs, operation, orders["bytes"], orders["seconds"])


def _memcpy(bench: Bench, orders: Orders) -> Orders:
    if bench.reader.device is not None:
        return device.copied(bench.reader, orders["bytes"])
    return ceilings.memcpy(orders["bytes"])


def _listen(bench: Bench, orders: Orders) -> Orders:
    return {"port": bench.stream.listen(orders.get("host", "127.0.0.1"))}


def _stream(bench: Bench, orders: Orders) -> Orders:
    return bench.stream.receive((orders["host"], orders["port"]), orders["bytes"])


def _requests(orders: Orders) -> list[Request]:
    return [
        Request(plain["name"], plain["tokens"], from_plain(plain["reader"]), from_plain(plain["source"]))
        for plain in orders["requests"]
    ]


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _end(bench: Bench) -> None:
    bench.ended.set()
    if bench.serving is not None:
        bench.serving.join()
    bench.stream.close()
    for lane in bench.lanes.values():
        lane.close()
    for window in bench.windows:
        window.close()
    for backend in bench.backends.values():
        backend.close()


_DEEDS: Deeds[Bench] = {
    "meet": _meet,
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
    serve(_begin, _DEEDS, _end)
