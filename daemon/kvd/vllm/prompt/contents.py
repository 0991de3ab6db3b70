"""What a multimodal input is, where vLLM does not say: it numbers them where neither of its caches wants a hash."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

_NUMBERED = re.compile(r"-(?P<modality>\w+)-\d+$")


def content_name(name: str, modality: str, data: Any) -> str:
    """The name of an input: vLLM's where that comes of its content, else one of its processed ``data``.

    vLLM ends a name with the modality and a number where it only counts inputs, and two engines count alike. Data that
    is not there or of an unknown form has a name that nothing else has.
    """
    found = _NUMBERED.search(name)
    if found is None or found["modality"] != modality:
        return name
    made = hashlib.sha256()
    try:
        _add(made, data)
    except _Unknown:
        return f"unknown-{secrets.token_hex(16)}"
    return f"data-{made.hexdigest()}"


def tensor_bytes(tensor: Any) -> memoryview:
    """The bytes of a tensor of torch's, in the order of its elements."""
    import torch  # who gives tensors has it loaded

    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


class _Unknown(Exception):
    """Data of which nothing can be said."""


def _add(made: Any, data: Any) -> None:
    """Add data with its form: mappings, lists, vLLM's elements, tensors and plain values."""
    if isinstance(data, Mapping):
        made.update(b"{%d" % len(data))
        for name in sorted(data):
            _add(made, str(name))
            _add(made, data[name])
    elif isinstance(data, (list, tuple)):
        made.update(b"[%d" % len(data))
        for part in data:
            _add(made, part)
    elif hasattr(data, "untyped_storage"):
        _add(made, f"{data.dtype} {tuple(data.shape)}")
        made.update(tensor_bytes(data))
    elif isinstance(data, (str, int, float, bool)):
        text = f"{type(data).__name__} {data!r}".encode("utf-8", "surrogatepass")
        made.update(b"=%d " % len(text) + text)
    elif getattr(data, "data", None) is not None:
        _add(made, data.data)
    else:
        raise _Unknown
