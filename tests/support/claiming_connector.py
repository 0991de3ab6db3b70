"""A KV connector that claims every prompt but its last token, once, and loads nothing: for tests of schedulers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class ClaimingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # Any to the check
    """``tables`` are the blocks of each claim by group."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.tables: dict[str, tuple[list[int], ...]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in self.tables:
            return 0, False
        return request.num_prompt_tokens - 1 - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.tables[request.request_id] = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        del request, block_ids
        return False, None

    request_finished = request_finished_all_groups

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        del request
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    # --- the worker's half, which no scheduler calls ---

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
