"""Which weights this engine runs: what is told of them to peers, found once in each process when the engine starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.shown import logger
from kvd.weights.checkpoint import (
    AS_READ,
    OF_FILE,
    UNKNOWN,
    Fingerprint,
    configuration_fingerprint,
    read_configuration,
    unknown,
    weights_fingerprint,
)
from kvd.weights.configuration import merged
from kvd.weights.errors import WeightsUnreadable
from kvd.weights.hub import hub_cache, hub_snapshot
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

_found: dict[str, dict[str, str]] = {}
_lock = threading.Lock()


def weights_facts(vllm_config: Any, settings: ConnectorSettings) -> dict[str, str]:
    """``config``, ``weights`` and ``weights_source`` of this engine, as far as they are known. Never raises.

    Where scheduler and worker share a process, files are read once for both.
    """
    if settings.weights == "off":
        return {"weights_source": "off"}
    with _lock:
        key = f"{vllm_config.kv_transfer_config.engine_id}\0{vllm_config.model_config.model}\0{settings.weights}"
        if key not in _found:
            _found.clear()
            _found[key] = _find(vllm_config, settings)
        return dict(_found[key])


def _find(vllm_config: Any, settings: ConnectorSettings) -> dict[str, str]:
    began = time.perf_counter()
    try:
        config, weights = _configuration(vllm_config), _weights(vllm_config, settings)
    except Exception as error:  # an engine is not to fail for what only tells it from others
        log.exception("what weights this engine runs could not be found")
        config, weights = "", unknown(f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - began
    if weights.value:
        log.info(
            "weights %s (%s), configuration %s, found in %.2f s",
            weights.value, weights.source, config, seconds,
        )  # fmt: skip
    else:
        log.warning(
            'the weights of this engine are %s; peers are compared by configuration (%s) and model name; to say which'
            ' they are set "weights" in kv_connector_extra_config to one id on both engines',
            weights.source, config or UNKNOWN,
        )  # fmt: skip
    told = {"config": config, "weights": weights.value, "weights_source": weights.source}
    return {name: value for name, value in told.items() if value}


def _weights(vllm_config: Any, settings: ConnectorSettings) -> Fingerprint:
    if settings.weights != "auto":
        return Fingerprint(settings.weights, "setting")
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = _text(load.load_format)
    if remote := getattr(model, "model_weights", ""):
        return unknown(f"they come from {str(remote).split(':', maxsplit=1)[0]} storage")
    if load_format == "dummy":
        return weights_fingerprint(Path(), load_format)
    try:
        place = _place(model.model, model.revision, load.download_dir)
    except WeightsUnreadable as error:
        return unknown(str(error))
    return weights_fingerprint(place, load_format)


def _configuration(vllm_config: Any) -> str:
    """Of the checkpoint's own file where there is one: the object that vLLM makes of it depends on versions."""
    model = vllm_config.model_config
    overrides: Any = getattr(model, "hf_overrides", None) or {}
    others: list[object] = []
    if not isinstance(overrides, Mapping):
        # A program's own function.
        others.append(
            f"{getattr(overrides, '__module__', '')}.{getattr(overrides, '__qualname__', overrides)}"
        )
        overrides = {}
    if (long := _long_factors(model)) is not None:
        others.append({"long_factors": long})
    try:
        named = getattr(model, "hf_config_path", None)
        place = _place(named or model.model, None if named else model.revision, None)
        folder = place.parent if place.is_file() else place
        mistral = _text(getattr(model, "config_format", "")) == "mistral"
        config = read_configuration(folder, ("params.json",)) if mistral else read_configuration(folder)
        return configuration_fingerprint(OF_FILE, merged(config, overrides), *others)
    except WeightsUnreadable as error:
        log.debug("the configuration is taken as vLLM read it: %s", error)
    # Overrides are in it already.
    return configuration_fingerprint(AS_READ, model.hf_config.to_dict(), *others)


def _long_factors(model: Any) -> bool | None:
    """Of rotary embeddings with factors for short and for long texts: whether vLLM takes the long ones.

    It decides that by ``--max-model-len``, so that two engines of one model may rotate keys differently.
    """
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, Mapping) or "long_factor" not in rope:
        return None
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return None if original is None else bool(model.max_model_len > original)


def _place(name: str, revision: str | None, cache: str | None) -> Path:
    """Where a model lies here: its folder or file, or what the hub's cache on this host has of it; asks no network."""
    place = Path(name).expanduser()
    if place.exists():
        return place
    if "://" in name:
        raise WeightsUnreadable(f"they come from {name.split(':', maxsplit=1)[0]} storage")
    return hub_snapshot(Path(cache) if cache else hub_cache(), name, revision or "main")


def _text(value: object) -> str:
    return str(getattr(value, "value", value))
