"""The handshake against vLLM's own: until all decoding ranks have what they need of a prefilling engine, as ratios.

    python benchmarks/handshake.py [--ranks 1x1,4x4,4x8,8x8,16x16,64x64] [--rounds 9] [--asking ranks,scheduler]
        [--json]

Ours is what `kvctl benchmark --handshake` measures: two kvds, started anew for each round, and simulated workers. All
decoding ranks ask at once for all of an engine of Llama-3.1-8B's geometry, with a region for each layer. Each is
answered when kvd has found the two engines to fit, and takes its answer apart. With `--asking scheduler` the decoders'
scheduler asks alone, as in an engine, and kvd tells its ranks.

Stock's is the installed vLLM's own listener function in a process of its own, with its own structs as payload. Each
decoding rank asks as NixlConnector does: a ZMQ context and a REQ socket of its own, one request after the other for
each rank that it reads from, both layers of the reply decoded, the hash compared. What either does with it afterwards,
NIXL's part above all, is the same and not measured.

Rounds alternate, so that both see the same machine; ratios are taken within a round, of the time until all ranks had
theirs. Processor time is that of all processes that take part, ranks included: it hardly depends on what else runs.
The time of the kvds, or of the listener, is told by itself: the rest is the simulated ranks' own, which share one
interpreter here.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, get_args

import msgspec
import zmq

from benchmarks.large_cards import with_regions
from kvctl.bench.handshake import CASES, METADATA_BYTES, Asking, Waits, measure, processor_seconds
from kvctl.bench.handshake_run import quantiles
from kvctl.engines.sources import planned
from kvd.geometry.model import EngineGeometry

LAYERS = 32
HASH = "0" * 64
REPEATS = 3
"""Times that the stock ranks ask in each round: its middle stands for the round."""


class Payload(msgspec.Struct):
    """vLLM's NixlHandshakePayload as a reader that does not import vLLM sees it."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


@dataclass
class Stock:
    """The stock listener in its process."""

    port: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    waits: Waits = field(default_factory=Waits)

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()


def listen(ranks: int, port: int, pipe: Connection) -> None:
    """The listener of vLLM, for ever."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlAgentMetadata,
        NixlHandshakePayload,
    )

    encode = msgspec.msgpack.encode
    inner = NixlAgentMetadata(
        engine_id="prefill",
        agent_metadata=os.urandom(METADATA_BYTES[0] + METADATA_BYTES[1] * LAYERS),
        kv_caches_base_addr=[(1 << 46) + at for at in range(LAYERS)],
        device_id=0,
        num_blocks=8192,
        block_lens=[65536] * LAYERS,
        block_strides=[65536] * LAYERS,
        kv_cache_layout="HND",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
    )
    payload = encode(NixlHandshakePayload(compatibility_hash=HASH, agent_metadata_bytes=encode(inner)))
    ready, stop = threading.Event(), threading.Event()
    threading.Thread(
        target=NixlBaseConnectorScheduler._nixl_handshake_listener,  # noqa: SLF001 - the function is what is measured
        args=({(0, rank): payload for rank in range(ranks)}, ready, stop, "127.0.0.1", port),
        daemon=True,
    ).start()
    ready.wait()
    pipe.send(len(payload))
    threading.Event().wait()


def start_stock(ranks: int) -> Stock:
    """The listener of an engine with so many ranks, answering."""
    context = multiprocessing.get_context("spawn")
    ours_end, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = context.Process(target=listen, args=(ranks, port, theirs), daemon=True)
    process.start()
    stock = Stock(port, process, ours_end)
    stock.waits.bytes = ours_end.recv()
    return stock


def ask_stock(stock: Stock, decoding: int, prefilling: int) -> None:
    """All decoding ranks ask at once, each for the ranks that it reads from."""
    each = max(1, prefilling // decoding)
    pids = [os.getpid(), stock.process.pid or 0]
    gc.freeze()  # as with ours
    try:
        gate = threading.Barrier(decoding + 1)
        with ThreadPoolExecutor(decoding) as threads:
            futures = [
                threads.submit(
                    ask_as_a_rank,
                    stock.port,
                    [rank * prefilling // decoding + at for at in range(each)],
                    gate,
                )
                for rank in range(decoding)
            ]
            gate.wait()
            spent, served = processor_seconds(pids), processor_seconds(pids[1:])
            begun = time.perf_counter()
            times = [future.result() for future in futures]
    finally:
        gc.unfreeze()
    stock.waits.processor.append(processor_seconds(pids) - spent)
    stock.waits.serving.append(processor_seconds(pids[1:]) - served)
    stock.waits.each += [ended - asked for asked, ended in times]
    stock.waits.whole.append(max(ended for _, ended in times) - begun)


def ask_as_a_rank(port: int, ranks: list[int], gate: threading.Barrier) -> tuple[float, float]:
    """What NixlConnector's `_nixl_handshake` sends and reads: when it began and when it had the last, in seconds."""
    gate.wait()
    begun = time.perf_counter()
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.linger = 0
        asking.connect(f"tcp://127.0.0.1:{port}")
        for rank in ranks:
            asking.setsockopt(zmq.RCVTIMEO, 5000)
            asking.send(msgspec.msgpack.encode((b"get_meta_msg", 0, rank)))
            frames = asking.recv_multipart()
            msgspec.msgpack.decode(frames[1])
            payload = msgspec.msgpack.Decoder(Payload).decode(frames[0])
            if payload.compatibility_hash != HASH:
                raise SystemExit(f"another hash: {payload.compatibility_hash}")
            msgspec.msgpack.decode(payload.agent_metadata_bytes)
        return begun, time.perf_counter()


def _engine(ranks: int) -> EngineGeometry:
    """Of so many ranks, each with a region for each layer, as vLLM allocates them and stock describes them."""
    engine = planned("llama-3.1-8b", f"tp={ranks}")
    return dataclasses.replace(engine, workers=tuple(map(with_regions, engine.workers)))


def compare(
    decoding: int, prefilling: int, rounds: int, folder: Path, ways: tuple[Asking, ...]
) -> list[dict[str, Any]]:
    """A row for each way to ask and case, and one for stock."""
    pair = _engine(decoding), _engine(prefilling)
    found = {(way, case): Waits() for way in ways for case in CASES}
    ratios: dict[tuple[str, str], list[float]] = {which: [] for which in found}
    stock = start_stock(prefilling)
    try:
        for _ in range(rounds):
            for _ in range(REPEATS):
                ask_stock(stock, decoding, prefilling)
            theirs = median(stock.waits.whole[-REPEATS:])
            for way in ways:
                for case, waits in measure(pair, 1, folder, asking=way).items():
                    found[way, case].add(waits)
                    ratios[way, case] += [seconds / theirs for seconds in waits.whole]
    finally:
        stock.stop()
    rows: list[dict[str, Any]] = []
    for (way, name), waits in (*found.items(), (("ranks", "stock"), stock.waits)):
        if not waits.whole:
            continue
        each, whole = quantiles(waits.each), quantiles(waits.whole)
        row: dict[str, Any] = {
            "decoding": decoding,
            "prefilling": prefilling,
            "asking": way,
            "case": name,
            "bytes": waits.bytes,
        }
        row |= {"each_p50": each.p50, "each_p99": each.p99, "whole_p50": whole.p50, "whole_p99": whole.p99}
        row |= {"processor": quantiles(waits.processor).p50, "serving": quantiles(waits.serving).p50}
        row |= {"per_second": decoding / whole.p50, "ratio": median(ratios.get((way, name)) or [1.0])}
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """One row as text, times in ms."""
    names = ("each_p50", "each_p99", "whole_p50", "whole_p99", "processor", "serving")
    times = [f"{1e3 * row[name]:.2f}" for name in names]
    return (
        f"{row['decoding']}x{row['prefilling']} {row['asking']:9} {row['case']:8}"
        f" a rank p50 {times[0]} p99 {times[1]}, all p50 {times[2]} p99 {times[3]},"
        f" processor {times[4]} ms, {times[5]} of it serves, {row['per_second']:.0f} a second,"
        f" {row['ratio']:.3f} of stock, {row['bytes']} bytes an answer\n"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1x1,4x4,4x8,8x8,16x16,64x64", help="decoding x prefilling ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--asking", default=",".join(get_args(Asking)), help="who asks")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    write: Callable[[str], object] = sys.stdout.write
    rows: list[dict[str, Any]] = []
    ways: tuple[Asking, ...] = tuple(way for way in get_args(Asking) if way in given.asking.split(","))
    with tempfile.TemporaryDirectory() as folder:
        for sizes in given.ranks.split(","):
            decoding, prefilling = map(int, sizes.split("x"))
            found = compare(decoding, prefilling, given.rounds, Path(folder), ways)
            rows += found
            if not given.json:
                write("".join(map(line, found)))
                sys.stdout.flush()
    if given.json:
        write(json.dumps({"load": os.getloadavg()[0], "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
