"""Tensors as older builds hand them over, in the form of today's: the same bytes at the same places."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.geometry.errors import UnknownShape
from kvd.vllm.memory.caches import in_one_form
from kvd.vllm.memory.tensors import worker_geometry
from tests.support.rigs.bench import (
    BF16,
    F32,
    I8,
    MLAAttentionSpec,
    Tensor,
    cache_config,
    dense,
    gdn,
    groups_of,
    place,
)

PAGE = 160
BLOCKS = 4
CONV = 3 * 12 * 2
"""Bytes of `gdn`'s convolution state: 3 taps of 8 + 2 x 2 channels, bfloat16."""


def states(*, gap: int = 0, page: int = PAGE, conv_step: int = 1) -> list[Tensor]:
    """The states of a layer as strided views of pages that are longer than their content."""
    pages = np.zeros(BLOCKS * PAGE, np.int8)
    conv = Tensor(pages, BF16, (BLOCKS, 3, 12), (PAGE // 2, 12 * conv_step, conv_step))
    ssm = Tensor(pages, F32, (BLOCKS, 2, 2, 2), (page // 4, 4, 2, 1), at=CONV + gap)
    return [conv, ssm]


def test_todays_tensors_stay_as_they_are() -> None:
    tensor = Tensor(np.zeros(512, np.uint16), BF16, (8, 2, 4, 8), dense((8, 2, 4, 8)))
    assert in_one_form({"l0": tensor}, I8)["l0"] is tensor


def test_a_latent_gets_its_head() -> None:
    tensor = Tensor(np.zeros(8 * 4 * 6, np.uint16), BF16, (8, 4, 6), dense((8, 4, 6)))
    made = in_one_form({"l0": tensor}, I8)
    assert (made["l0"].shape, made["l0"].stride()) == ((8, 1, 4, 6), (24, 24, 6, 1))
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=6)
    config = cache_config(8, (spec, ("l0",)))
    layer = worker_geometry(made, config, groups_of(config), place()).layers["l0"][1]
    assert (layer.stride, layer.page.content) == (48, 48)


def test_states_become_one_page() -> None:
    both = states()
    page = in_one_form({"l0": both}, I8)["l0"]
    content = CONV + 2 * 2 * 2 * 4
    assert (page.dtype, page.shape, page.stride()[0]) == (I8, (BLOCKS, 1, 1, content), PAGE)
    assert page.data_ptr() == both[0].data_ptr()


def test_their_geometry_is_that_of_a_page() -> None:
    pages = np.zeros(BLOCKS * PAGE, np.int8)
    whole = Tensor(pages, I8, (BLOCKS, 1, 1, CONV + 32), (PAGE, CONV + 32, CONV + 32, 1))
    config = cache_config(BLOCKS, (gdn(), ("l0",)))
    of_states, of_page = (
        worker_geometry(in_one_form({"l0": cache}, I8), config, groups_of(config), place()).layers["l0"][1]
        for cache in (states(), whole)
    )
    assert (of_states.page, of_states.stride) == (of_page.page, of_page.stride)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (states(gap=4), "one after the other"),
        (states(page=PAGE // 2), "one after the other"),
        (states(conv_step=2), "has gaps"),
    ],
)
def test_states_that_stand_otherwise_are_refused(broken: list[Tensor], says: str) -> None:
    with pytest.raises(UnknownShape, match=says):
        in_one_form({"l0": broken}, I8)
