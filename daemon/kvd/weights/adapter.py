"""Which LoRA adapter a folder holds."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TypeVar

from kvd.weights.blocks import digest_files
from kvd.weights.configuration import NOISE, digest_configuration
from kvd.weights.errors import WeightsUnreadable
from kvd.weights.hub import hub_cache, hub_snapshot
from kvd.weights.safetensors import digest_tensors
from kvd.weights.sampling import read_json

CONFIGURATION = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files of an adapter, in the order in which vLLM looks for them."""
SAMPLES = 1 << 13
"""Samples of an adapter: it is read while a request waits."""
KEPT = 256
"""Adapters that are remembered."""
BY_NAME = "name-"
"""How the fingerprint of an adapter begins that is known by its name only."""
_VERSION = "a1-"
# Where it came from, how it was trained, and in which order a set was written.
_NOISE = NOISE | {
    "base_model_name_or_path", "revision", "peft_version", "inference_mode", "init_lora_weights", "auto_mapping",
    "loftq_config", "eva_config", "corda_config", "runtime_config", "task_type", "lora_dropout", "qalora_group_size",
}  # fmt: skip
_SETS = ("target_modules", "modules_to_save", "layers_to_transform", "exclude_modules", "target_parameters")

K = TypeVar("K")
V = TypeVar("V")
_Stamps = tuple[tuple[int, int, int], ...]
_known: OrderedDict[str, tuple[_Stamps, str]] = OrderedDict()
_loaded: OrderedDict[tuple[int, str], str] = OrderedDict()
_lock = threading.Lock()


def loaded_adapter(number: int, path: str, *, reload: bool = False) -> str:
    """`adapter_fingerprint` of an adapter as this engine loaded it: vLLM reads its files once for each ``number``.

    Files that are replaced later count on a ``reload``, or under another number.
    """
    with _lock:
        known = None if reload else _loaded.get((number, path))
    made = known or adapter_fingerprint(path)
    with _lock:
        _keep(_loaded, (number, path), made)
    return made


def adapter_fingerprint(path: str) -> str:
    """What the adapter at ``path`` is, as vLLM's ``lora_path`` names it: the same for two copies of one adapter.

    Reads its configuration and samples of its tensors, once for each state of its files. A hub's name is looked up in
    the cache of this host. Where neither has it or it cannot be read, the fingerprint is made from the name and begins
    with `BY_NAME`. Never raises.
    """
    try:
        folder = os.path.expanduser(path)  # noqa: PTH111 - a string is all that is needed on the way of a request
    except ValueError:  # no name of a user
        return _by_name(path)
    seen = _seen(folder)
    if seen is None and path.count("/") == 1 and not path.startswith(("/", "~", ".")):
        with contextlib.suppress(WeightsUnreadable, ValueError):
            folder = str(hub_snapshot(hub_cache(), path))
            seen = _seen(folder)
    if seen is None:
        return _by_name(path)
    with _lock:
        known = _known.get(folder)
        if known is not None and known[0] == seen:
            _known.move_to_end(folder)
            return known[1]
    try:
        made = _VERSION + _digest(Path(folder)).hex()[:32]
    except WeightsUnreadable:
        made = _by_name(path)
    with _lock:
        _keep(_known, folder, (seen, made))
    return made


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)


def _by_name(path: str) -> str:
    name = path.rstrip("/").encode("utf-8", "surrogatepass")
    return BY_NAME + hashlib.blake2b(name, digest_size=16).hexdigest()


def _seen(folder: str) -> _Stamps | None:
    """The state of the adapter's files; None where it has no weights here."""
    found = []
    for name in (CONFIGURATION, *WEIGHTS):
        try:
            state = os.stat(f"{folder}/{name}")  # noqa: PTH116
        except (OSError, ValueError):
            continue
        found.append((state.st_ino, state.st_mtime_ns, state.st_size))
        if name != CONFIGURATION:
            return tuple(found)
    return None


def _digest(folder: Path) -> bytes:
    weights = next((path for name in WEIGHTS if (path := folder / name).is_file()), folder / WEIGHTS[0])
    digest = digest_tensors if weights.suffix == ".safetensors" else digest_files
    made = hashlib.blake2b(b"adapter", digest_size=32)
    read = read_json(folder / CONFIGURATION)
    for name in _SETS:
        if isinstance(entries := read.get(name), list):
            read[name] = sorted(entries, key=str)
    made.update(digest_configuration(read, noise=_NOISE))
    made.update(digest([weights], SAMPLES))
    return made.digest()
