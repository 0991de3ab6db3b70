"""KV memory that peers can map: what torch is asked for inside the context, and what stands behind it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvd.backends.direct.memfd import backing
from kvd.backends.errors import BackendError, BackendUnavailable
from kvd.geometry.model import Region
from kvd.vllm.memory.pool import kv_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("backend", "options", "device", "shared"),
    [
        ("direct", {}, "cpu", True),
        ("auto", {}, "cpu", True),
        ("auto", {"engine": "mooncake"}, "cpu", True),
        ("direct", {"memfd": False}, "cpu", False),
        ("auto", {"direct_options": {"memfd": False}}, "cpu", False),
        ("direct", {}, "cuda", False),
        ("nixl", {"num_threads": 2}, "cpu", False),
    ],
)
def test_only_what_reads_directly_on_cpus_wants_it(
    backend: str, options: dict[str, Any], device: str, shared: bool
) -> None:
    pytest.importorskip("torch")
    assert (kv_memory(backend, options, device) is not None) is shared


def test_a_wrong_option_is_named_before_memory_is_allocated() -> None:
    with pytest.raises(BackendError, match="colour"):
        kv_memory("direct", {"colour": 1}, "cpu")


def test_an_unknown_backend_on_cpus_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailable, match="no backend 'nxil': there are nixl"):
        kv_memory("nxil", {}, "cpu")


def test_the_cache_stands_in_a_memfd_and_all_else_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    cpu = torch.device("cpu")
    with _context():
        cache = torch.zeros(3 * MIB + 5, dtype=torch.int8, device=cpu)
        small = torch.zeros(4096, dtype=torch.int8, device=cpu)
        other = torch.zeros((2, MIB), dtype=torch.float32, device=cpu)
        meta = torch.zeros(3 * MIB, dtype=torch.int8, device="meta")
    after = torch.zeros(3 * MIB, dtype=torch.int8, device=cpu)
    assert _memfd(cache)
    assert (cache.shape, cache.dtype, cache.untyped_storage().nbytes()) == (
        (3 * MIB + 5,),
        torch.int8,
        3 * MIB + 5,
    )
    assert not cache.any()
    view = cache[: 2 * MIB].view(torch.float32).view(2, -1)
    view[1] = 1.5  # as vLLM's layers write: through a view of other shape and type
    assert view.sum().item() == 1.5 * MIB / 4
    assert meta.device.type == "meta"
    assert not any(map(_memfd, (small, other, after)))


def _context() -> AbstractContextManager[None]:
    context = kv_memory("direct", {}, "cpu")
    assert context is not None
    return context


def _memfd(tensor: Any) -> bool:
    storage = tensor.untyped_storage()
    return backing(Region(storage.data_ptr(), storage.nbytes())) is not None
