"""KvdConnector that writes down when bytes moved, steps ended and loads were reported. For benchmarks/layerwise.py.

One JSON object a line goes to the file that KVD_MEASURED names; times are CLOCK_MONOTONIC, the same for all processes
of a host. Measured is whatever lane the backend has: its methods are overridden in a class made for the purpose.
"""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

import json
import os
import time
from typing import Any

from kvd.backends import registry as choose
from kvd.backends.contract import Lane, State, Transfer
from kvd.vllm import connector
from kvd.vllm.connector import KvdConnector

_file = open(os.environ["KVD_MEASURED"], "a", buffering=1, encoding="utf-8")  # noqa: SIM115, PTH123 - until the end


def _note(**what: Any) -> None:
    _file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")


def _open_backend(kind: str, name: str, options: Any) -> Any:
    """A backend whose lanes note what they moved."""
    backend = choose.open_backend(kind, name, options)
    made = type(backend)

    def lane(self: Any, name: str) -> Lane:
        return _noting(made.lane(self, name))

    backend.__class__ = type("Measured", (made,), {"__slots__": (), "lane": lane})  # type: ignore[assignment]
    return backend


def _noting(lane: Lane) -> Lane:
    """The lane, noting each transfer when it is seen to be done."""
    made = type(lane)

    def poll(self: Any, transfer: Transfer) -> State:
        before = transfer.state
        state = made.poll(self, transfer)
        if state is State.DONE and before is not State.DONE:
            _note(what="moved", bytes=transfer.bytes)
        return state

    def submit(self: Any, *arguments: Any, **named: Any) -> Transfer:
        return posted(made.submit(self, *arguments, **named))

    def submit_selection(self: Any, *arguments: Any, **named: Any) -> Transfer:
        return posted(made.submit_selection(self, *arguments, **named))

    def posted(transfer: Transfer) -> Transfer:
        if transfer.state is State.DONE:  # a backend that copies while it posts
            _note(what="moved", bytes=transfer.bytes)
        return transfer

    members: dict[str, Any] = {"__slots__": (), "poll": poll, "submit": submit}
    if hasattr(made, "submit_selection"):
        members["submit_selection"] = submit_selection
    lane.__class__ = type("Measured", (made,), members)
    return lane


connector.open_backend = _open_backend


class MeasuredConnector(KvdConnector):
    """Notes when the last layer of each step was computed, and the loads that are reported."""

    _saved = 0.0

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer is computed."""
        self._saved = time.monotonic()
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """A step is over; one that computed nothing, to look after transfers, has no layers."""
        if self._saved:
            _note(what="computed", last=self._saved)
            self._saved = 0.0
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What is reported: a request that is received may start to decode."""
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:
            _note(what="received", failed=len(results.failed_recving or ()))
        return results
