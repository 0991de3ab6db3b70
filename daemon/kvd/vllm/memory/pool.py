"""KV memory on CPUs that other processes can map: vLLM allocates its cache inside the context made here.

Both CPU model runners of vLLM 0.32 allocate all KV memory of a worker with one ``torch.zeros`` of bytes. They do so
within the context that the connector's ``get_mem_pool_context`` gives. The context answers that one call from a memfd,
since torch has no pools of host memory to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from kvd.backends.direct.memfd import memfd
from kvd.backends.registry import maps_memory
from kvd.shown import logger

log = logger(__name__)

LEAST_BYTES = 1 << 20
"""Smaller tensors than this are left to torch: they are no KV cache."""


def kv_memory(backend: str, options: Mapping[str, Any], device: str) -> AbstractContextManager[None] | None:
    """The context in which KV memory is to be allocated, or None where torch's own is as good.

    ``backend`` and ``options`` are those of the connector's settings, ``device`` is torch's name of its kind.

    Raises:
        BackendError: there is no such backend, or it does not know one of the options.
    """
    return _zeros_in_memfd() if device == "cpu" and maps_memory(backend, options) else None


def _zeros_in_memfd() -> AbstractContextManager[None]:
    import torch
    from torch.overrides import TorchFunctionMode

    class ZerosInMemfd(TorchFunctionMode):
        """Answers ``torch.zeros`` of many bytes on the CPU; everything else is torch's."""

        def __torch_function__(
            self,
            function: Callable[..., Any],
            types: Sequence[Any],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            given = dict(kwargs or {})
            if function is torch.zeros and (size := _bytes_asked(args, given)) >= LEAST_BYTES:
                try:
                    return torch.frombuffer(memfd("kvd-kv", size), dtype=given["dtype"])
                except OSError as error:
                    log.warning("KV memory cannot be shared with other processes: no memfd: %s", error)
            return function(*args, **given)

    return cast("AbstractContextManager[None]", ZerosInMemfd())


def _bytes_asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The size of a flat tensor of 8-bit integers on the CPU that is asked for, 0 for any other."""
    import torch

    flat = len(args) == 1 and isinstance(args[0], int) and kwargs.keys() <= {"dtype", "device"}
    if not flat or kwargs.get("dtype") not in (torch.int8, torch.uint8):
        return 0
    return int(args[0]) if torch.device(kwargs.get("device", "cpu")).type == "cpu" else 0
