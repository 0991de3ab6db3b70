"""What somebody configured for a stock connector in ``--kv-transfer-config``, outside of its extra config too."""

from __future__ import annotations

from typing import Any

from kvd.worker.settings import ConnectorSettings, read_settings
from kvd.worker.stock import translate

UNREAD: dict[str, tuple[Any, str]] = {
    "kv_port": (14579, "kvd's address is that of its own configuration"),
    "kv_ip": ("127.0.0.1", "kvd's address is that of its own configuration"),
    "kv_rank": (None, "kvd tells engines apart by engine_id"),
    "kv_parallel_size": (1, "kvd counts engines itself"),
    "kv_buffer_size": (1e9, "nothing is buffered"),
    "enable_permute_local_kv": (False, "every pair of layouts is planned for as it is"),
}
"""Fields of vLLM's KVTransferConfig without effect here: vLLM's default, and why."""


def connector_settings(vllm_config: Any) -> tuple[ConnectorSettings, str]:
    """An engine's settings, and in one line what became of those of stock connectors; empty where there are none.

    ``kv_buffer_device`` is taken where it asks for host memory beside a device: that is the backend `staged`.

    Raises:
        BadSettings: an entry that nobody has, or a value that an entry cannot have.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return ConnectorSettings(), ""
    extra = dict(transfer.kv_connector_extra_config)
    translated = translate(extra)
    buffer = getattr(transfer, "kv_buffer_device", None)
    if buffer == "cpu" and vllm_config.device_config.device_type != "cpu":
        if extra.setdefault("backend", "staged") == "staged":
            translated.taken.append('kv_buffer_device is taken for "backend": "staged"')
        else:
            translated.idle.append('kv_buffer_device ("backend": "staged" goes by way of host memory)')
    for name, (default, instead) in UNREAD.items():
        if getattr(transfer, name, default) != default:
            translated.idle.append(f"{name} ({instead})")
    return read_settings(extra), translated.says
