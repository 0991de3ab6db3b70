"""`describe` says the same things of every kind of model; all figures were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvd.topology.describe import PairDescription, ReadSummary, describe, plan_engine
from kvd.topology.plan import plan_worker
from kvd.topology.reads import Read
from kvd.topology.sources import CutPage, cut_page
from tests.support.samples import engine, gated_delta_net, latent, llama

TWO = ("layers.0", "layers.1")


def codes(pair: PairDescription) -> list[str]:
    return [f.code for f in pair.findings]


def test_four_ranks_read_eight_heads_from_eight_ranks() -> None:
    # A rank of tp 4 has 2 heads: 2 x 16 tokens x (128 + 128) x 2 bytes = 16,384; one of tp 8 has half of that.
    local = engine("d", ("full", 16, None, llama(TWO)), tp=4)
    remote = engine("p", ("full", 16, None, llama(TWO)), tp=8)
    pair = describe(local, remote)
    assert pair.compatible
    assert pair.local.tp == 4
    assert pair.remote.block_sizes == (16,)
    assert [(g.index, g.kind, g.layers, g.block_size, g.bytes_per_block) for g in pair.groups] == [
        (0, "full", TWO, 16, 16_384)
    ]
    assert pair.reads == tuple(
        ReadSummary(f"tp{head // 2}", f"tp{head}", 0, (head, head + 1), 8_192, 1, layers=2)
        for head in range(8)
    )
    assert pair.findings == ()


def test_eight_ranks_read_eight_heads_from_four_ranks() -> None:
    pair = describe(
        engine("d", ("full", 16, None, llama(TWO)), tp=8), engine("p", ("full", 16, None, llama(TWO)), tp=4)
    )
    assert pair.reads[3] == ReadSummary("tp3", "tp1", 0, (3, 4), 8_192, 1, layers=2)
    assert len(pair.reads) == 8


def test_token_major_pages_fall_apart_where_heads_are_split() -> None:
    # NHD: for each of 16 tokens one head's 256 values stand together, 512 bytes.
    shape = llama(TWO, layout="NHD")
    pair = describe(
        engine("d", ("full", 16, None, shape), tp=4), engine("p", ("full", 16, None, shape), tp=8)
    )
    assert {(r.bytes_per_block, r.segments_per_block) for r in pair.reads} == {(8_192, 16)}
    storm = next(f for f in pair.findings if f.code == "DESCRIPTOR_STORM")
    assert "16 copies of 512 bytes" in storm.message
    assert "HND" in storm.hint


def test_token_major_pages_of_equal_ranks_move_whole() -> None:
    shape = llama(TWO, layout="NHD")
    pair = describe(
        engine("d", ("full", 16, None, shape), tp=4), engine("p", ("full", 16, None, shape), tp=4)
    )
    assert {(r.bytes_per_block, r.segments_per_block) for r in pair.reads} == {(16_384, 1)}


def test_replicated_heads_are_read_from_different_replicas() -> None:
    # 2 heads on 4 ranks: ranks 0 and 1 hold head 0. The two readers of a head take different replicas.
    shape = llama(("layers.0",), heads=2)
    pair = describe(
        engine("d", ("full", 16, None, shape), tp=4), engine("p", ("full", 16, None, shape), tp=4)
    )
    assert [(r.local_rank, r.remote_rank, r.heads) for r in pair.reads] == [
        ("tp0", "tp0", (0, 1)),
        ("tp1", "tp1", (0, 1)),
        ("tp2", "tp2", (1, 2)),
        ("tp3", "tp3", (1, 2)),
    ]


def test_three_to_one() -> None:
    shape = llama(("layers.0",), heads=12)
    pair = describe(
        engine("d", ("full", 16, None, shape), tp=2), engine("p", ("full", 16, None, shape), tp=6)
    )
    assert [(r.remote_rank, r.heads) for r in pair.reads if r.local_rank == "tp1"] == [
        ("tp3", (6, 8)),
        ("tp4", (8, 10)),
        ("tp5", (10, 12)),
    ]


def test_sizes_that_share_no_divisor_are_only_another_split() -> None:
    # 12 heads: tp 2 has 0..6 and 6..12, tp 3 has 4 heads a rank: the middle rank serves both.
    shape = llama(("layers.0",), heads=12)
    pair = describe(
        engine("d", ("full", 16, None, shape), tp=2), engine("p", ("full", 16, None, shape), tp=3)
    )
    assert [(r.local_rank, r.remote_rank, r.heads) for r in pair.reads] == [
        ("tp0", "tp0", (0, 4)),
        ("tp0", "tp1", (4, 6)),
        ("tp1", "tp1", (6, 8)),
        ("tp1", "tp2", (8, 12)),
    ]


def test_a_larger_local_block_is_filled_from_several() -> None:
    # 64 tokens of 8 heads: 64 x 8 x 512 = 262,144 bytes out of 4 blocks; in HND each of 8 heads has 4 parts.
    pair = describe(
        engine("d", ("full", 64, None, llama(TWO, block=64))),
        engine("p", ("full", 16, None, llama(TWO, block=16))),
    )
    assert [(r.bytes_per_block, r.segments_per_block, r.layers) for r in pair.reads] == [(262_144, 32, 2)]


def test_a_smaller_local_block_takes_its_part() -> None:
    pair = describe(
        engine("d", ("full", 16, None, llama(TWO, block=16))),
        engine("p", ("full", 64, None, llama(TWO, block=64))),
    )
    assert [(r.bytes_per_block, r.segments_per_block, r.layers) for r in pair.reads] == [(65_536, 8, 2)]


def test_latents_are_spread_over_replicas() -> None:
    # 64 tokens x 576 x 2 bytes = 73,728. One reader, two replicas: they take the layers in turn.
    shape = latent(("layers.0", "layers.1", "layers.2", "layers.3"))
    pair = describe(engine("d", ("mla", 64, None, shape)), engine("p", ("mla", 64, None, shape), tp=2))
    assert pair.groups[0].bytes_per_block == 73_728
    assert pair.reads == (
        ReadSummary("tp0", "tp0", 0, None, 73_728, 1, layers=2),
        ReadSummary("tp0", "tp1", 0, None, 73_728, 1, layers=2),
    )


def test_copies_that_nobody_reads_are_told() -> None:
    shape = latent(("layers.0",))
    pair = describe(engine("d", ("mla", 64, None, shape)), engine("p", ("mla", 64, None, shape), tp=2))
    assert codes(pair) == ["IDLE_SOURCES"]


def test_a_hybrid_of_states_and_attention() -> None:
    # conv: 3 taps x 1,024 channels x 2 = 6,144 bytes; ssm: 4 x 128 x 128 x 4 = 262,144; together 268,288.
    groups = (
        ("mamba", 640, None, gated_delta_net(("layers.0",))),
        ("full", 640, None, llama(("layers.1",), heads=2, block=640)),
    )
    pair = describe(engine("d", *groups), engine("p", *groups))  # type: ignore[arg-type]
    assert [(g.kind, g.bytes_per_block) for g in pair.groups] == [("mamba", 268_288), ("full", 655_360)]
    assert [(r.group, r.heads, r.bytes_per_block, r.segments_per_block) for r in pair.reads] == [
        (0, None, 268_288, 1),
        (1, (0, 2), 655_360, 1),
    ]


def test_a_state_is_read_from_two_ranks_section_by_section() -> None:
    # Each rank has half of q (128 of 256 channels), k and v: 3 taps x 3 sections; its two heads of ssm are one piece.
    shape = gated_delta_net(("layers.0",))
    pair = describe(engine("d", ("mamba", 640, None, shape)), engine("p", ("mamba", 640, None, shape), tp=2))
    assert pair.reads == (
        ReadSummary("tp0", "tp0", 0, None, 134_144, 10, layers=1),
        ReadSummary("tp0", "tp1", 0, None, 134_144, 10, layers=1),
    )
    assert "DESCRIPTOR_STORM" not in codes(pair)  # ten copies of 13 KB on average are no storm


def test_sliding_windows_beside_full_attention() -> None:
    groups = (
        ("sliding_window", 16, 128, llama(("layers.0",))),
        ("full", 16, None, llama(("layers.1",))),
    )
    pair = describe(engine("d", *groups, tp=2), engine("p", *groups, tp=2))  # type: ignore[arg-type]
    assert [(g.kind, g.layers) for g in pair.groups] == [
        ("sliding_window", ("layers.0",)),
        ("full", ("layers.1",)),
    ]
    assert len(pair.reads) == 4


def test_unequal_blocks_in_a_window_are_a_warning() -> None:
    pair = describe(
        engine("d", ("sliding_window", 64, 128, llama(("layers.0",), block=64))),
        engine("p", ("sliding_window", 16, 128, llama(("layers.0",), block=16))),
    )
    assert "WINDOW_PARTIAL_BLOCK" in codes(pair)


def test_pipeline_stages_with_unequal_splits() -> None:
    names = ("layers.0", "layers.1", "layers.2")
    shape = llama(names)
    local = engine(
        "d", ("full", 16, None, shape), stages=(frozenset(names[:1]), frozenset(names[1:])), model_len=1
    )
    remote = engine("p", ("full", 16, None, shape), stages=(frozenset(names[:2]), frozenset(names[2:])))
    pair = describe(local, remote)
    assert pair.groups[0].layers == names
    assert [(r.local_rank, r.remote_rank, r.layers) for r in pair.reads] == [
        ("tp0", "tp0", 1),
        ("tp0.pp1", "tp0", 1),
        ("tp0.pp1", "tp0.pp1", 1),
    ]


def test_what_cannot_be_mapped_is_a_finding_and_no_reads() -> None:
    local = engine("d", ("full", 16, None, llama(TWO, heads=8)), tp=4)
    remote = engine("p", ("full", 16, None, llama(TWO, heads=4)), tp=4)
    pair = describe(local, remote)
    assert not pair.compatible
    assert pair.reads == ()
    finding = pair.findings[0]
    assert (finding.code, finding.severity) == ("TP_UNSUPPORTED", "error")
    assert "8" in finding.message
    assert "4" in finding.message


def test_a_missing_rank_is_told_by_name_of_the_trouble() -> None:
    remote = engine("p", ("full", 16, None, llama(TWO)), tp=4)
    short = replace(remote, workers=remote.workers[:3])
    pair = describe(engine("d", ("full", 16, None, llama(TWO)), tp=4), short)
    assert not pair.compatible
    assert "RANK_NOT_REGISTERED" in codes(pair)


@pytest.mark.parametrize(("latents", "kinds"), [(True, 1), (False, 8)])
def test_pages_that_workers_share_are_cut_once_and_give_the_same_plans(
    monkeypatch: pytest.MonkeyPatch, latents: bool, kinds: int
) -> None:
    made: list[object] = []

    def counted(*arguments: Any) -> CutPage:
        made.append(arguments)
        return cut_page(*arguments)

    monkeypatch.setattr("kvd.topology.plan.cut_page", counted)
    layers = latent(TWO) if latents else llama(TWO)
    local, remote = (
        engine(name, ("mla" if latents else "full", 16, None, layers), tp=tp)
        for name, tp in (("d", 16), ("p", 4))
    )
    plans = plan_engine(local, remote)
    assert len(made) == kinds, "16 workers have one page of MLA, and 8 of 8 heads"
    alone = [plan_worker(worker, local.workers, remote.workers) for worker in local.workers]
    assert [[*map(facts_of, one.reads)] for one in plans] == [[*map(facts_of, one.reads)] for one in alone]


def facts_of(read: Read) -> tuple[object, ...]:
    rows = read.rows
    return (
        read.remote,
        read.phase,
        read.layers,
        read.heads,
        *(a.tolist() for a in (rows.local, rows.remote, rows.length)),
    )
