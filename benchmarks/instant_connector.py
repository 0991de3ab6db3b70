"""A vLLM KV connector whose loads are complete at once, with nothing moved. For benchmarks/step_cost.py."""
# ruff: noqa: INP001 - a folder of scripts

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults

from benchmarks.nothing_connector import NothingConnector


class InstantMetadata(KVConnectorMetadata):
    """The requests whose loads begin with a step."""

    def __init__(self, loads: list[str]) -> None:
        self.loads = loads


class InstantConnector(NothingConnector):
    """Says of a request that brings params that all but its last token are loaded, a step later."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: list[str] = []
        self._began: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last token, between steps."""
        if not request.kv_transfer_params or num_computed_tokens:
            return 0, False
        return request.num_prompt_tokens - 1, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin it with this step."""
        del blocks
        if num_external_tokens:
            self._loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The loads of this step."""
        del scheduler_output
        loads, self._loads = self._loads, []
        return InstantMetadata(loads)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """They are complete."""
        del forward_context, kwargs
        self._began = self._get_connector_metadata().loads

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What began with this step."""
        del finished_req_ids
        return KVConnectorTransferResults(finished_recving=set(self._began))
