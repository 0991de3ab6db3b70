"""Listeners as stock connectors of vLLM have them, without vLLM: they end for good at a question that is not right."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

HEADS, HEAD_SIZE, LAYERS = 8, 128, 64
"""Of qwen3-32b."""
FIRST_FIELDS = (
    "engine_id", "agent_metadata", "kv_caches_base_addr", "device_id", "num_blocks", "block_lens", "kv_cache_layout",
    "block_size", "ssm_sizes", "attn_backend_name", "physical_blocks_per_logical_kv_block",
)  # fmt: skip
"""What vLLM 0.26 sends."""


def stock_metadata(tp: int = 4, **others: Any) -> dict[str, Any]:
    """The metadata of one worker of qwen3-32b in bfloat16, as vLLM 0.32 sends it."""
    block_size = others.get("block_size", 16)
    lengths = [block_size * 2 * HEAD_SIZE * 2 * max(1, HEADS // tp)] * LAYERS
    return {
        "engine_id": "prefill",
        "agent_metadata": b"agent of prefill",
        "kv_caches_base_addr": [(1 << 46) + n for n in range(LAYERS)],
        "device_id": 0,
        "num_blocks": 8192,
        "block_lens": lengths,
        "block_strides": lengths,
        "kv_cache_layout": "LBHNC",
        "block_size": block_size,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": [8192] * LAYERS,
        "region_group_ids": [0] * LAYERS,
        "region_names": [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)],
        "region_mem_types": ["VRAM"] * LAYERS,
        "dcp_size": 1,
        "pcp_size": 1,
        "ple_block_len": None,
        "region_members": [],
        "packed_member_layouts": {},
    } | others


def stock_factors(**others: Any) -> dict[str, Any]:
    """What vLLM 0.32 makes the hash of such an engine of."""
    return {
        "vllm_version": "0.32.0",
        "nixl_connector_version": 14,
        "model": "Qwen/Qwen3-32B",
        "dtype": "torch.bfloat16",
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "num_hidden_layers": LAYERS,
        "attn_backend_name": "FLASH_ATTN",
        "cache_dtype": "auto",
        "is_hma_enabled": True,
        "speculative_config": None,
        "transfer_mode": "pull",
    } | others


def stock_payload(metadata: Mapping[str, Any], factors: Mapping[str, Any]) -> bytes:
    """What the listener sends of one worker."""
    told = hashlib.sha256(json.dumps(dict(factors), sort_keys=True).encode()).hexdigest()
    inner = msgspec.msgpack.encode(dict(metadata))
    return msgspec.msgpack.encode({"compatibility_hash": told, "agent_metadata_bytes": inner})


@dataclass
class StockListener:
    """A listener; ``asked`` are the ranks that it was asked for, and what was wrong at last."""

    port: int
    asked: list[Any] = field(default_factory=list)
    thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether it would still answer."""
        return self.thread is not None and self.thread.is_alive()


@contextmanager
def nixl_listener(ranks: Mapping[tuple[int, int], bytes]) -> Iterator[StockListener]:
    """One that answers for these (pipeline, tensor) ranks as NixlConnector does, and dies as it does."""
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.linger = 0
    listener = StockListener(sock.bind_to_random_port("tcp://127.0.0.1"))
    stop = threading.Event()

    def listen() -> None:
        with sock:
            sock.rcvtimeo = 20
            while not stop.is_set():
                try:
                    identity, empty, packed = sock.recv_multipart()
                    word, pp, tp = msgspec.msgpack.decode(packed)
                    listener.asked.append((pp, tp))
                    sock.send_multipart((identity, b"", ranks[pp, tp], msgspec.msgpack.encode(1.5)))
                    assert (empty, word) == (b"", b"get_meta_msg")
                except zmq.Again:
                    continue
                except (ValueError, KeyError, AssertionError, msgspec.DecodeError) as error:
                    listener.asked.append(error)
                    return

    listener.thread = threading.Thread(target=listen, daemon=True)
    listener.thread.start()
    try:
        yield listener
    finally:
        stop.set()
        listener.thread.join()
        context.term()


@contextmanager
def saying(*parts: bytes, hold: bool = False, every: float = 0) -> Iterator[int]:
    """Somebody who sends these bytes to whoever connects, a part ``every`` so many seconds.

    He ends the connection then, unless he is to ``hold`` it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            try:
                while True:
                    made, _ = server.accept()
                    with made:
                        made.settimeout(5)
                        with suppress(OSError):
                            for part in parts:
                                made.sendall(part)
                                done.wait(every)
                            if not hold:
                                made.shutdown(socket.SHUT_WR)
                            while made.recv(4096):
                                pass
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            done.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
