"""Live tensors as layers: strides tell the layout, CPU attention is not what its shape says, shapes must add up."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.geometry.check import check_worker
from kvd.geometry.errors import BadGeometry, UnevenShard, UnknownShape
from kvd.geometry.live import (
    BlockAxes,
    LiveTensor,
    attention_layer,
    cpu_attention_layer,
    find_region,
    whole_block_layer,
)
from kvd.geometry.model import Axis, Group, Layer, Region, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.geometry.shards import ContextShare, Share, share, token_axes
from kvd.geometry.states import StateShape, state_fields
from kvd.topology.blocks import BlockList
from kvd.topology.compile import compile_plan
from kvd.topology.errors import FieldMismatch
from kvd.topology.plan import plan_worker

REGIONS = (Region(4096, 1 << 20),)


def tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> LiveTensor:
    return LiveTensor("l", 4096 + 512, shape, strides, "bfloat16", 2)


def cpu(packing: str, *, count: int = 4, tokens: int = 8) -> Layer:
    """4 blocks of 2 heads x 8 tokens x (16 + 16) elements; ``count`` tells kernel blocks from blocks."""
    return cpu_attention_layer(
        tensor((4, 2, tokens, 32), (128 * tokens, 64 * tokens, 64, 2)),
        REGIONS,
        blocks=BlockAxes(count, tokens * 4 // count),
        heads=Share(0, 2, 2),
        key_size=16,
        value_size=16,
        packing=packing,  # type: ignore[arg-type]
    )


def test_strides_come_from_the_tensor() -> None:
    layer = attention_layer(
        tensor((4, 8, 2, 32), (1024, 128, 64, 2)),
        REGIONS,
        dims=("block", "token", "head", "key+value"),
        blocks=BlockAxes(4, 8),
        heads=Share(2, 2, 4),
        key_size=16,
        value_size=16,
    )
    assert (layer.offset, layer.stride, layer.page.content) == (512, 1024, 1024)
    keys, values = layer.page.fields
    assert keys.axes == (Axis("head", 2, 2, 1, 64), Axis("token", 0, 8, 1, 128), Axis("dim", 0, 16, 1, 2))
    assert values.offset == 32


def test_more_blocks_than_the_worker_has_are_kernel_blocks() -> None:
    layer = attention_layer(
        tensor((4, 2, 8, 32), (1024, 512, 64, 2)),
        REGIONS,
        dims=("block", "head", "token", "key+value"),
        blocks=BlockAxes(2, 16),
        heads=Share(0, 2, 2),
        key_size=16,
        value_size=16,
    )
    assert layer.stride == 2048
    assert layer.page.fields[0].axes_of("token") == (Axis("token", 0, 2, 8, 1024), Axis("token", 0, 8, 1, 64))


def test_vec_kernels_keep_keys_transposed_and_values_after_them() -> None:
    # Seen in vLLM 0.32: token 1 of the keys stands one element after token 0, the values begin after 16 x 8 keys.
    keys, values = cpu("vec").page.fields
    assert (keys.offset, keys.axes_of("token")[0].stride, keys.axes_of("dim")[0].stride) == (0, 2, 16)
    assert (values.offset, values.axes_of("token")[0].stride, values.axes_of("dim")[0].stride) == (256, 32, 2)
    assert cpu("vec").page.content == 1024


def test_amx_kernels_keep_keys_in_tiles_of_sixteen_tokens_and_values_in_tiles_of_sixteen_entries() -> None:
    keys, values = cpu("amx", tokens=32).page.fields
    assert (keys.offset, values.offset) == (0, 16 * 32 * 2)
    # A tile of keys has 16 tokens, and pairs of entries one after the other.
    assert keys.axes_of("token") == (Axis("token", 0, 2, 16, 16 * 16 * 2), Axis("token", 0, 16, 1, 4))
    assert keys.axes_of("dim") == (Axis("dim", 0, 8, 2, 64), Axis("dim", 0, 2, 1, 2))
    # A tile of values has all tokens of the kernel block, by pairs; 16 entries are one tile.
    assert values.axes_of("dim") == (Axis("dim", 0, 16, 1, 4),)
    assert values.axes_of("token") == (Axis("token", 0, 16, 2, 64), Axis("token", 0, 2, 1, 2))


def test_amx_blocks_without_whole_tiles_are_no_blocks_of_that_kernel() -> None:
    with pytest.raises(UnknownShape, match="tokens beyond whole tiles is 8"):
        cpu("amx")


def test_opaque_blocks_keep_their_heads_apart_but_not_their_tokens() -> None:
    keys, values = cpu("opaque").page.fields
    assert keys.labels == values.labels == ("head", "packed")
    assert cpu("opaque").page.content == 1024
    assert dict(cpu("opaque", count=2).page.fields[0].shape)["packed"] == 256


def test_a_tensor_outside_every_region() -> None:
    with pytest.raises(UnknownShape, match="0x10"):
        find_region(REGIONS, 16, "layer l")


@pytest.mark.parametrize(
    ("blocks", "heads", "key"),
    [(BlockAxes(3, 8), 2, 16), (BlockAxes(4, 16), 2, 16), (BlockAxes(4, 8), 4, 16), (BlockAxes(4, 8), 2, 8)],
)
def test_facts_that_contradict_the_shape(blocks: BlockAxes, heads: int, key: int) -> None:
    with pytest.raises(UnknownShape, match="l"):
        attention_layer(
            tensor((4, 2, 8, 32), (1024, 512, 64, 2)),
            REGIONS,
            dims=("block", "head", "token", "key+value"),
            blocks=blocks,
            heads=Share(0, heads, heads),
            key_size=key,
            value_size=16,
        )


def test_mamba2_sections() -> None:
    # 4 of 8 heads x 64 = 256 channels of x; 1 group of 8 x 128: B and C have 128 each.
    live = StateShape("mamba2", ((3, 512), "bfloat16", 2), ((4, 64, 128), "float32", 4), heads=8, groups=1)
    fields = {f.name: f for f in state_fields(live, 1, 2)}
    assert [
        (n, f.axes_of("channel")[0].start, f.axes_of("channel")[0].extent)
        for n, f in fields.items()
        if n != "ssm"
    ] == [
        ("conv.x", 256, 256),
        ("conv.B", 0, 128),
        ("conv.C", 0, 128),
    ]
    assert fields["ssm"].offset == 3 * 512 * 2
    assert fields["ssm"].axes_of("head")[0].start == 4


def test_a_state_whose_sections_do_not_add_up() -> None:
    live = StateShape("gdn", ((3, 257), "bfloat16", 2), ((4, 64, 128), "float32", 4), heads=4)
    with pytest.raises(UnknownShape, match="257"):
        state_fields(live, 0, 1)


def test_shares() -> None:
    assert [share("heads", 2, r, 6).start for r in range(6)] == [0, 0, 0, 1, 1, 1]
    assert share("heads", 12, 2, 3) == Share(8, 4, 12)
    with pytest.raises(UnevenShard, match=r"8 heads .* 3 ranks"):
        share("heads", 8, 0, 3)
    with pytest.raises(BadGeometry, match="rank 3 of 3"):
        share("heads", 3, 3, 3)


def arranged(kernel_tokens: int, blocks: int, context: ContextShare | None = None) -> WorkerGeometry:
    """32 tokens of 12 bytes in kernel blocks that hold them in an order of their own, as ``blocks`` blocks."""
    kernel_blocks, context = 32 // kernel_tokens, context or ContextShare()
    view = LiveTensor(
        "l", 4096, (kernel_blocks, 1, kernel_tokens, 12), (kernel_tokens * 12, 12, 12, 1), "uint8", 1
    )
    tokens = 32 // blocks * context.size
    layer = whole_block_layer(view, REGIONS, blocks=BlockAxes(blocks, tokens, context), packing="index")
    worker = WorkerGeometry(
        Rank(tp=context.rank, dcp=context.rank), blocks, REGIONS, (Group(0, "mla", tokens, (layer,)),)
    )
    check_worker(worker)
    return worker


def test_kernel_blocks_of_an_order_of_their_own_move_whole() -> None:
    here, there = arranged(8, 2), arranged(8, 4)
    plan = plan_worker(here, [here], [there])
    mine, theirs = BlockList(0, np.array([1])), BlockList(0, np.array([3, 0]))
    rows = compile_plan(plan, {0: mine}, {0: theirs}, tokens=16)[0]
    assert sorted(zip(rows.local - 4096, rows.remote - 4096, rows.length, strict=True)) == [
        (192, 288, 96),
        (288, 0, 96),
    ]


def test_kernel_blocks_of_an_order_of_their_own_fit_only_their_like() -> None:
    here, longer = arranged(8, 4), arranged(16, 2)
    with pytest.raises(FieldMismatch, match=r"index, blocks of 8 tokens .* index, blocks of 16 tokens"):
        plan_worker(here, [here], [longer])
    halves = [arranged(8, 4, ContextShare(rank, 2)) for rank in (0, 1)]
    with pytest.raises(FieldMismatch):
        plan_worker(here, [here], halves)
    thinner = [arranged(8, 4, ContextShare(rank, 4)) for rank in range(4)]
    with pytest.raises(FieldMismatch, match="has 2 of context here and 4 there"):
        plan_worker(halves[0], halves, thinner)
    assert plan_worker(halves[1], halves, halves).sources == (1,)


def test_a_block_of_an_order_of_its_own_that_is_not_one_piece() -> None:
    view = LiveTensor("l", 4096, (4, 1, 8, 12), (256, 16, 16, 1), "uint8", 1)
    with pytest.raises(UnknownShape, match="bytes between tokens is 16 in the tensor and 12 in the spec"):
        whole_block_layer(view, REGIONS, blocks=BlockAxes(4, 8), packing="index")


def test_interleaved_tokens() -> None:
    # Rank 1 of 2 with runs of 2: of 8 tokens it holds 2, 3, 6, 7.
    axes = token_axes(
        kernel_blocks=1, kernel_tokens=4, kernel_stride=0, token_stride=10, context=ContextShare(1, 2, 2)
    )
    assert axes == (Axis("token", 0, 2, 4, 20), Axis("token", 2, 2, 1, 10))
    with pytest.raises(UnevenShard, match="runs of 3"):
        token_axes(
            kernel_blocks=1, kernel_tokens=4, kernel_stride=0, token_stride=1, context=ContextShare(0, 2, 3)
        )
