"""The handshake: N decoding ranks learn what they must know of an engine of N ranks, cold, warm and after its restart.

    python benchmarks/handshake.py [--ranks 1,4,16,64] [--rounds 5] [--no-stock] [--json]

Two real kvds, as on two hosts; the workers are real sessions with them, all in this process, with the geometry of a
Llama-3.1-8B. All decoding ranks ask at once. The stock side is the installed vLLM's own listener function, in a process
of its own, serving payloads of the size of a NixlConnector worker's; each decoding rank asks it for the one rank that
it reads from, over a new socket, as NixlConnector does. What either does with the answer afterwards is not measured.

cold     the decoding kvd never heard of the engine
warm     it did: the answer is in its cache
restart  the engine's workers are new ones
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import zmq

from kvctl.demo.deployment import Kvd, two_hosts
from kvctl.sources import planned
from kvd.client.session import Session
from kvd.geometry.codec import encode_worker
from kvd.geometry.model import EngineGeometry
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import Endpoint, EngineFacts, RankId, WorkerCard
from kvd.wire.registration import RegisterWorker

SECONDS = 120.0
METADATA = os.urandom(332 + 44 * 32)
"""As large as NIXL's metadata of a worker with one region a layer."""

Asked = list[float]


@contextmanager
def engine(host: Kvd, geometry: EngineGeometry, name: str) -> Iterator[list[Session]]:
    """The sessions of all workers of an engine, registered."""
    facts = EngineFacts(
        engine_id=name,
        model=geometry.model,
        role="prefill" if host.name == "prefill" else "decode",
        tp=geometry.tp,
        groups=len(geometry.workers[0].groups),
        world_size=geometry.world_size,
        facts=geometry.facts,
    )
    sessions = []
    try:
        for worker in geometry.workers:
            card = WorkerCard(
                engine=facts,
                rank=RankId(worker.rank.tp),
                incarnation=uuid.uuid4().hex,
                pid=os.getpid(),
                host=socket.gethostname(),
                backend="nixl",
                geometry=encode_worker(worker),
                metadata=METADATA,
            )
            sessions.append(Session(lambda c=card: RegisterWorker(c), directory=host.directory, name=name))  # type: ignore[misc]
        for session in sessions:
            session.wait(lambda state: bool(state.engine_generation), SECONDS)
        yield sessions
    finally:
        for session in sessions:
            session.close()


def ask(decoders: list[Session], prefiller: Session, names: tuple[str, str]) -> tuple[Asked, float]:
    """All decoding ranks ask for the engine at once: seconds until each had it, and until all had."""
    state = prefiller.state
    question = GetPeer(
        local_engine=names[0],
        engine_id=names[1],
        endpoint=Endpoint(state.host, state.port),
        generation=state.engine_generation,
    )
    ended: Asked = []
    begun = time.perf_counter()
    futures = [session.call(question, SECONDS) for session in decoders]
    for future in futures:
        future.add_done_callback(lambda _: ended.append(time.perf_counter() - begun))
    for future in futures:
        answer = future.result(SECONDS)
        if not isinstance(answer, PeerReady):
            raise SystemExit(f"kvd answered with {answer}")
    return ended, time.perf_counter() - begun


def ours(hosts: tuple[Kvd, Kvd], ranks: int, rounds: int) -> dict[str, tuple[Asked, list[float]]]:
    """Seconds of every rank and of every round, by case."""
    geometry = planned("llama-3.1-8b", f"tp={ranks}")
    found: dict[str, tuple[Asked, list[float]]] = {case: ([], []) for case in ("cold", "warm", "restart")}

    def note(case: str, asked: tuple[Asked, float]) -> None:
        found[case][0].extend(asked[0])
        found[case][1].append(asked[1])

    with engine(hosts[1], geometry, f"decode-{ranks}") as decoders:
        for number in range(rounds):
            names = f"decode-{ranks}", f"prefill-{ranks}-{number}"
            with engine(hosts[0], geometry, names[1]) as there:
                note("cold", ask(decoders, there[0], names))
                note("warm", ask(decoders, there[0], names))
            with engine(hosts[0], geometry, names[1]) as there:
                note("restart", ask(decoders, there[0], names))
    return found


def listen(ranks: int, port: int, pipe: Connection) -> None:
    """The listener of vLLM, until told to end."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    payload = {(0, rank): METADATA + bytes(256) for rank in range(ranks)}
    ready, stop = threading.Event(), threading.Event()
    threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,  # noqa: SLF001 - the function is what is measured
        args=(payload, ready, stop, "127.0.0.1", port),
        daemon=True,
    ).start()
    ready.wait()
    pipe.send(True)
    pipe.recv()
    os._exit(0)


def stock(ranks: int, rounds: int) -> tuple[Asked, list[float]]:
    """The same of the stock listener: it keeps nothing, so there is one case."""
    context = multiprocessing.get_context("spawn")
    ours_end, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = context.Process(target=listen, args=(ranks, port, theirs))
    process.start()
    try:
        ours_end.recv()
        each: Asked = []
        whole: list[float] = []
        with zmq.Context() as sockets, ThreadPoolExecutor(ranks) as threads:
            for _ in range(rounds):
                gate = threading.Barrier(ranks + 1)
                futures = [threads.submit(ask_stock, sockets, port, rank, gate) for rank in range(ranks)]
                gate.wait()
                begun = time.perf_counter()
                each += [future.result() for future in futures]
                whole.append(time.perf_counter() - begun)
        ours_end.send(None)
        process.join(10)
        return each, whole
    finally:
        process.kill()
        process.join()


def ask_stock(sockets: Any, port: int, rank: int, gate: threading.Barrier) -> float:
    """One well-formed request over a new socket, as NixlConnector sends it."""
    gate.wait()
    begun = time.perf_counter()
    with sockets.socket(zmq.REQ) as asking:
        asking.linger = 0
        asking.connect(f"tcp://127.0.0.1:{port}")
        asking.send(msgspec.msgpack.encode((b"get_meta_msg", 0, rank)))
        asking.recv_multipart()
    return time.perf_counter() - begun


def figures(each: Asked, whole: list[float], ranks: int) -> dict[str, float]:
    """p50 and p99 of a rank's wait in seconds, handshakes a second with all ranks asking."""
    ordered = sorted(each)
    return {
        "p50_s": median(ordered),
        "p99_s": ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)],
        "per_s": ranks / median(whole),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    write: Callable[[str], object] = sys.stdout.write
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        for ranks in map(int, given.ranks.split(",")):
            found = ours(hosts, ranks, given.rounds)
            if not given.no_stock:
                found["stock"] = stock(ranks, given.rounds)
            lines += [{"ranks": ranks, "case": case, **figures(*seen, ranks)} for case, seen in found.items()]
            if not given.json:
                base = next((one for one in lines if one["ranks"] == ranks and one["case"] == "stock"), None)
                for one in lines:
                    if one["ranks"] == ranks:
                        ratio = f", {one['p50_s'] / base['p50_s']:.2f} of stock's p50" if base else ""
                        times = f"p50 {1e3 * one['p50_s']:.2f} ms, p99 {1e3 * one['p99_s']:.2f} ms"
                        write(
                            f"{ranks}x{ranks} {one['case']:8} {times}, {one['per_s']:.0f} a second{ratio}\n"
                        )
    if given.json:
        write(json.dumps({"load": os.getloadavg()[0], "lines": lines}) + "\n")


if __name__ == "__main__":
    main()
