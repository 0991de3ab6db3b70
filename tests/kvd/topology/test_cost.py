"""What a request costs: bytes and descriptors worked out by hand."""

from __future__ import annotations

from kvd.topology.cost import request_cost
from kvd.topology.describe import plan_engine
from tests.support.samples import engine, gated_delta_net, latent, llama

LAYERS = tuple(f"layers.{i}" for i in range(4))


def test_a_dense_model() -> None:
    # 100 tokens are 7 blocks of 16; each block of each of 4 layers has 8 heads x 16 x 512 bytes.
    local = engine("d", ("full", 16, None, llama(LAYERS)), tp=2)
    remote = engine("p", ("full", 16, None, llama(LAYERS)), tp=4)
    cost = request_cost(local, remote, plan_engine(local, remote), tokens=100)
    assert cost.bytes == 7 * 4 * 8 * 16 * 512
    assert cost.descriptors == 7 * 4 * 4  # a run of two heads from each of 4 remote ranks
    assert cost.coalesced_descriptors == 7 * 4 * 4  # shards of one page never continue in the next page
    assert set(cost.bytes_by_rank.values()) == {cost.bytes // 4}
    assert set(cost.bytes_by_local_rank.values()) == {cost.bytes // 2}
    assert cost.seconds(1e9) == cost.bytes / 2 / 1e9


def test_equal_ranks_coalesce_to_one_run_a_layer() -> None:
    local, remote = (engine(name, ("full", 16, None, llama(LAYERS)), tp=2) for name in "dp")
    cost = request_cost(local, remote, plan_engine(local, remote), tokens=512)
    assert (cost.descriptors, cost.coalesced_descriptors) == (32 * 4 * 2, 4 * 2)


def test_replicas_share_the_load() -> None:
    local = engine("d", ("mla", 64, None, latent(LAYERS)))
    remote = engine("p", ("mla", 64, None, latent(LAYERS)), tp=4)
    cost = request_cost(local, remote, plan_engine(local, remote), tokens=640)
    assert set(cost.bytes_by_rank.values()) == {10 * 73_728}


def test_only_the_window_moves() -> None:
    local, remote = (engine(name, ("sliding_window", 16, 64, llama(LAYERS))) for name in "dp")
    cost = request_cost(local, remote, plan_engine(local, remote), tokens=1600)
    # Tokens 1536 to 1600 are 4 blocks.
    assert cost.bytes == 4 * 4 * 8 * 16 * 512


def test_a_state_costs_the_same_for_every_length() -> None:
    local, remote = (engine(name, ("mamba", 640, None, gated_delta_net(LAYERS))) for name in "dp")
    plans = plan_engine(local, remote)
    assert {request_cost(local, remote, plans, tokens=n).bytes for n in (1, 1000)} == {4 * 268_288}


def test_requests_may_be_larger_than_the_cache() -> None:
    local, remote = (engine(name, ("full", 16, None, llama(LAYERS))) for name in "dp")
    cost = request_cost(local, remote, plan_engine(local, remote), tokens=1 << 20)
    assert cost.bytes == (1 << 20) * 4 * 8 * 512


def test_links_tell_who_sends_how_much_to_whom() -> None:
    local = engine("d", ("full", 16, None, llama(LAYERS)), tp=2)
    remote = engine("p", ("full", 16, None, llama(LAYERS)), tp=4)
    cost = request_cost(local, remote, plan_engine(local, remote), tokens=16)
    # Two heads of one block of 4 layers.
    assert cost.bytes_by_link == {
        (f"tp{reader}", f"tp{source}"): 4 * 2 * 16 * 512
        for reader, source in ((0, 0), (0, 1), (1, 2), (1, 3))
    }
