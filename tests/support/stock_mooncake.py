"""vLLM's own MooncakeConnector where torch has no accelerator: one question of its worker is answered, no more.

Its worker asks torch which device is the current one; a build for CPUs has an answer to everything but that.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0


class StockMooncakeConnector(MooncakeConnector):  # type: ignore[misc] # Any to the check
    """The same, by a name of its own: vLLM takes a registered name from its own module alone."""
