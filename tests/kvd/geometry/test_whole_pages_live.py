"""Pages whose inside is not known, as the installed vLLM makes them: copied whole by plans, read through its views.

No engine runs: the backends that make such pages need a GPU, but what they say of a page, and how vLLM allocates and
views it, are plain functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.topology.errors import FieldMismatch
from kvd.topology.plan import plan_worker
from tests.support.live_caches import HEADS, SIZE, cache, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing vLLM takes its time


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    pytest.importorskip("vllm", reason="vLLM is not installed: nothing to compare with")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.kv_cache_utils  # noqa: F401 - warns once, here

        yield


def nvfp4(tp: int, block: int = 64) -> Any:
    """As the FlashInfer backend completes it: a slot each for the keys and the values of a head."""
    import torch
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
    from vllm.v1 import kv_cache_interface as v1

    return v1.FullAttentionSpec(
        block_size=block,
        num_kv_heads=HEADS // tp,
        head_size=SIZE,
        dtype=torch.uint8,
        kv_quant_mode=v1.get_kv_quant_mode("nvfp4"),
        num_head_slots=2 * HEADS // tp,
        state_content_bytes=nvfp4_kv_cache_full_dim(SIZE),
    )


def planes(tp: int) -> Any:
    """As ROCm's and B12x's backends complete it: a slot for all keys of a worker and one for all values."""
    import torch
    from vllm.v1 import kv_cache_interface as v1

    heads = HEADS // tp
    return v1.FullAttentionSpec(
        block_size=64,
        num_kv_heads=heads,
        head_size=SIZE,
        dtype=torch.bfloat16,
        num_head_slots=2,
        state_content_bytes=heads * SIZE * 2,
    )


@pytest.mark.parametrize("made", [nvfp4, planes])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC"])
def test_pages_with_slots_move_whole_between_workers_that_hold_the_same_heads(made: Any, layout: str) -> None:
    import torch

    here = [cache({"l0": made(2)}, 2, rank, layout) for rank in (0, 1)]
    there = [cache({"l0": made(2)}, 2, rank, layout) for rank in (0, 1)]
    page = here[1].geometry.groups[0].layers[0].page
    assert page.content == made(2).unpadded_page_size_bytes
    for mine, theirs in zip(here, there, strict=True):
        read(mine, here, there, [1, 2], [6, 4], tokens=100)
        got, want = mine.views["l0"][[1, 2]], theirs.views["l0"][[6, 4]]
        assert (got.view(torch.uint8) == want.view(torch.uint8)).all()


def test_pages_with_slots_of_other_heads_are_refused() -> None:
    whole, halves = cache({"l0": nvfp4(1)}), [cache({"l0": nvfp4(2)}, 2, rank) for rank in (0, 1)]
    with pytest.raises(FieldMismatch, match="field block has 1 of head shards here and 2 there"):
        plan_worker(whole.geometry, [whole.geometry], [half.geometry for half in halves])
    slots_first = cache({"l0": nvfp4(1)}, layout="LBHNC")
    with pytest.raises(FieldMismatch, match="tokens before slots"):
        plan_worker(whole.geometry, [whole.geometry], [slots_first.geometry])


def compressed(kind: str, covers: int) -> Any:
    """An entry for several tokens: DeepSeek V4's latents, and its index or Qwen 4's keys."""
    import torch
    from vllm.v1 import kv_cache_interface as v1

    if kind == "latent":
        return v1.MLAAttentionSpec(
            block_size=256,
            num_kv_heads=1,
            head_size=512,
            dtype=torch.uint8,
            tokens_per_state=covers,
            alignment=576,
            model_version="deepseek_v4",
            state_content_bytes=584,
        )
    return v1.MLAAttentionSpec(
        block_size=256,
        num_kv_heads=1,
        head_size=132 if kind == "index" else 128,
        dtype=torch.uint8 if kind == "index" else torch.bfloat16,
        tokens_per_state=covers,
    )


@pytest.mark.parametrize("kind", ["latent", "index", "keys"])
def test_entries_of_several_tokens_move_with_their_kernel_blocks(kind: str) -> None:
    import torch

    here, there = cache({"l0": compressed(kind, 4)}), cache({"l0": compressed(kind, 4)})
    assert (here.geometry.groups[0].kind, here.geometry.groups[0].block_size) == ("mla", 256)
    assert here.geometry.groups[0].layers[0].page.content == compressed(kind, 4).unpadded_page_size_bytes
    before = here.views["l0"].clone()
    read(here, [here], [there], [1, 2], [6, 4], tokens=300)
    got, want = here.views["l0"], there.views["l0"]
    assert (got[[1, 2]].view(torch.uint8) == want[[6, 4]].view(torch.uint8)).all()
    others = [0, 3, 4, 5, 6, 7]
    assert (got[others].view(torch.uint8) == before[others].view(torch.uint8)).all()


def test_entries_of_other_numbers_of_tokens_are_refused() -> None:
    here, there = cache({"l0": compressed("keys", 4)}), cache({"l0": compressed("keys", 8)})
    with pytest.raises(FieldMismatch, match=r"4 an entry .*8 an entry"):
        plan_worker(here.geometry, [here.geometry], [there.geometry])


def ring(rows: int) -> Any:
    """The raw keys and gate scores of a pool of tokens that is not full yet, as GLM-5-next keeps them."""
    import torch
    from vllm.v1 import kv_cache_interface as v1

    return v1.CircularBufferSpec(
        block_size=rows,
        num_kv_heads=2,
        head_size=128,
        head_size_v=0,
        dtype=torch.bfloat16,
        dcp_sharded=False,
    )


def test_a_circular_buffer_moves_beside_what_it_is_compressed_into() -> None:
    import torch

    specs = {"l0.index": compressed("keys", 4), "l0.tail": ring(8)}
    here, there = [cache(specs, 2, rank) for rank in (0, 1)], cache(specs)
    (group,) = (g for g in there.geometry.groups if g.layer_names == ("l0.tail",))
    assert group.kind == "mamba"
    assert group.layers[0].page.content == 2 * group.block_size * 128 * 2
    for mine in here:
        before = mine.views["l0.tail"].clone()
        read(mine, here, [there], [3], [5], tokens=256)
        got, want = mine.views["l0.tail"], there.views["l0.tail"]
        assert (got[3].view(torch.uint8) == want[5].view(torch.uint8)).all()
        assert (got[4:].view(torch.uint8) == before[4:].view(torch.uint8)).all()


def test_circular_buffers_of_other_sizes_are_refused() -> None:
    here, there = cache({"l0.tail": ring(8)}), cache({"l0.tail": ring(16)})
    with pytest.raises(FieldMismatch, match="field ring has 8 of row here and 16 there"):
        plan_worker(here.geometry, [here.geometry], [there.geometry])
