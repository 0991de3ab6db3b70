"""A decoding worker's lane and a prefilling worker in another process: the probe and the loads after it, for real."""

import pytest

from benchmarks.first_load import measure


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nixl", "mooncake", "direct"])
def test_the_null_block_comes_first_and_then_the_loads(backend: str) -> None:
    """The two processes look at every byte, and end with an error where another one came."""
    if backend != "direct":
        pytest.importorskip(backend, exc_type=ImportError)
    found = measure(backend, probe=True, blocks=32)
    assert found.first > 0
    assert found.later > 0
