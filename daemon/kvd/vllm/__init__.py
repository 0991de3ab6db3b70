"""KvdConnector: the data plane inside vLLM's workers, and the scheduler's half of it.

``kv_connector: KvdConnector, kv_connector_module_path: kvd.vllm`` makes vLLM look the class up here; it is
imported only then, so that the rest of the package can be read and tested without vLLM.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvdConnector":
        from kvd.vllm.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
