"""A vLLM KV connector that does nothing: what is left is the cost of having one. For benchmarks/overhead.py."""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


class NothingConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers every call with nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Nothing."""
        del finished_req_ids
        return KVConnectorTransferResults()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing."""
        del request, num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing, in the class that vLLM wants."""
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Nothing."""
        del request, block_ids
        return False, None
