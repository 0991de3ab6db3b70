"""KvdConnector that counts what its own methods take of the engine's threads. For benchmarks/overhead.py.

The file that KVD_TIMED names holds two 64-bit integers: nanoseconds on the processor inside the connector's methods,
and how often a step was scheduled. It is mapped, so a reader sees them at any moment.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import functools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from kvd.vllm.connector import KvdConnector

METHODS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "has_pending_push_work",
    "update_connector_output",
    "request_finished_all_groups",
)

with open(os.environ["KVD_TIMED"], "r+b") as _file:  # noqa: PTH123 - it is mapped
    _counts = memoryview(mmap.mmap(_file.fileno(), 16)).cast("q")


def _timed(method: Callable[..., Any], steps: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return method(*arguments, **named)
        finally:
            _counts[0] += time.thread_time_ns() - began
            _counts[1] += steps

    return call


TimedConnector = type(
    "TimedConnector",
    (KvdConnector,),
    {name: _timed(getattr(KvdConnector, name), name == "build_connector_meta") for name in METHODS},
)
