"""A worker that is told a peer in outline plans, writes and connects as one that is told the whole card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given

from kvd.client.cards import CardReader
from kvd.geometry.alike import AlikeReader
from kvd.geometry.codec import encode_worker
from kvd.geometry.errors import NotTold
from kvd.geometry.model import EngineGeometry
from kvd.geometry.rank import Rank
from kvd.service.peers.comparer import exchange as found_by
from kvd.service.peers.comparer.exchange import KindsRead, find_exchange
from kvd.topology.errors import TopologyError
from kvd.topology.plan import Plan
from kvd.topology.push import LayerPush
from kvd.topology.transfer_topology import RemoteEngine, TransferTopology
from kvd.wire.card_parts import ToldCard, outlined
from kvd.wire.identity import EngineCard, EngineFacts, WorkerCard
from kvd.worker.peers.followed import register
from tests.kvd.topology.test_oracle import THOROUGH, cases
from tests.support import oracle
from tests.support.raising import raises
from tests.support.samples import engine, gated_delta_net, latent, llama

Case = tuple[EngineGeometry, EngineGeometry, int, oracle.Request]
ONE = ("layers.0",)


def card_of(geometry: EngineGeometry) -> EngineCard:
    facts = EngineFacts(engine_id=geometry.engine_id, model="m", tp=geometry.tp, pp=geometry.pp)
    workers = tuple(
        WorkerCard(
            engine=facts, rank=worker.rank, incarnation="i", pid=1, host="h", backend="nixl",
            geometry=encode_worker(worker), metadata=f"of {worker.rank}".encode(),
        )
        for worker in geometry.workers
    )  # fmt: skip
    return EngineCard(engine=facts, generation="g", workers=workers)


def told(
    local: EngineGeometry, remote: EngineGeometry, rank: Rank, *, pushes: bool
) -> tuple[RemoteEngine, RemoteEngine] | None:
    """The remote engine for a local worker: by its whole card, and in outline. None where kvd makes no outline."""
    card, reader, kinds = card_of(remote), AlikeReader(), KindsRead()
    read = [reader.read_document(worker.geometry)[0] for worker in card.workers]
    for worker, geometry in zip(card.workers, read, strict=True):
        kinds.add(worker, geometry)
    # What is found may not depend on how busy the machine is.
    with patch.object(found_by, "EXCHANGE_SECONDS", 60.0):
        exchange = find_exchange(local, replace(remote, workers=tuple(read)), kinds, pushes=pushes)
    if exchange is None:
        return None
    position = [worker.rank for worker in local.workers].index(rank)
    outline = outlined(card, "shape", exchange.layout, exchange.partners[position])
    assert outline is not None
    cards = ToldCard(card), ToldCard(replace_workers(card), outline=outline)
    whole, sparse = (register(TransferTopology(local, rank), one, CardReader()) for one in cards)
    return whole, sparse


def replace_workers(card: EngineCard) -> EngineCard:
    return EngineCard(engine=card.engine, generation=card.generation, workers=())


def plain(plan: Plan) -> tuple[object, ...]:
    """All of a plan, for reads are compared by identity."""
    reads = [
        (
            r.remote, r.here, r.there, s.group, s.remote_group, s.kind, s.phase, s.layers, s.local_stride,
            s.remote_stride, s.heads, s.window, s.runs.local.tobytes(), s.runs.remote.tobytes(),
            s.runs.length.tobytes(),
        )
        for r in plan.reads
        for s in [r.shape]
    ]  # fmt: skip
    sizes = plan.block_sizes, plan.remote_block_sizes, plan.local_blocks, plan.remote_blocks
    return plan.local_rank, plan.remote_ranks, sizes, reads


def written(pushes: Mapping[str, LayerPush]) -> list[tuple[object, ...]]:
    return [(p.layer, p.group, p.source_group, p.unit, plain(p.plan)) for p in pushes.values()]


@THOROUGH
@given(cases(by_tp=True))
def test_of_random_engines(case: Case) -> None:
    local, remote, number, _ = case
    both = told(local, remote, local.workers[number].rank, pushes=False)
    assert both is not None
    whole, sparse = both
    assert plain(sparse.plan) == plain(whole.plan)
    assert sparse.handshake_targets == whole.handshake_targets
    assert (sparse.devices, sparse.describe_line()) == (whole.devices, whole.describe_line())
    for worker in remote.workers:
        assert written(sparse.layer_reads(worker.rank)) == written(whole.layer_reads(worker.rank))
    assert list(sparse.geometry.by_rank) == list(whole.geometry.by_rank)


@THOROUGH
@given(cases(by_tp=True))
def test_what_is_pushed_to_random_engines(case: Case) -> None:
    """The one that prefills is told of the one that decodes."""
    remote, local, number, _ = case
    number %= len(local.workers)
    if (both := told(local, remote, local.workers[number].rank, pushes=True)) is None:
        return  # it cannot read what it would write: its kvd tells whole cards
    whole, sparse = both
    for worker in remote.workers:
        pushes = whole.pushes(worker.rank)
        assert written(sparse.pushes(worker.rank)) == written(pushes)
        if pushes:
            assert sparse.metadata_of(worker.rank) == whole.metadata_of(worker.rank)


@pytest.mark.parametrize(
    ("local", "remote", "sources"),
    [
        (engine("d", ("full", 16, None, llama(ONE)), tp=8), engine("p", ("full", 16, None, llama(ONE)), tp=8), {3}),
        (engine("d", ("full", 16, None, llama(ONE)), tp=4), engine("p", ("full", 16, None, llama(ONE)), tp=8), {6, 7}),
        (engine("d", ("full", 16, None, llama(ONE)), tp=8), engine("p", ("full", 16, None, llama(ONE)), tp=4), {1}),
        (engine("d", ("mla", 64, None, latent(ONE)), tp=4), engine("p", ("mla", 64, None, latent(ONE)), tp=4), {3}),
        (
            engine("d", ("full", 16, None, llama(ONE)), ("mamba", 16, None, gated_delta_net(("s",))), tp=4),
            engine("p", ("full", 16, None, llama(ONE)), ("mamba", 16, None, gated_delta_net(("s",))), tp=2),
            {1},
        ),
    ],
    ids=["equal", "4 of 8", "8 of 4", "mla", "hybrid"],
)  # fmt: skip
def test_partners_are_told_in_full_and_of_others_neither_address_nor_metadata(
    local: EngineGeometry, remote: EngineGeometry, sources: set[int]
) -> None:
    both = told(local, remote, Rank(tp=3), pushes=False)
    assert both is not None
    _, sparse = both
    assert {rank.tp for rank in sparse.handshake_targets} == sources
    for worker, known in zip(remote.workers, sparse.geometry.workers, strict=True):
        if worker.rank.tp in sources:
            assert known == worker
            continue
        (_, layer), *_ = known.layers.values()
        with raises("KVD-GEOMETRY-NOT-TOLD", match=f"no addresses of the peer's worker {worker.rank}"):
            known.page_address(layer)
        with raises("KVD-GEOMETRY-NOT-TOLD", match=f"no metadata of the peer's worker {worker.rank}"):
            sparse.metadata_of(worker.rank)


def test_a_source_that_was_not_told_is_an_error_and_never_an_address() -> None:
    local, remote = (engine(name, ("full", 16, None, llama(ONE)), tp=4) for name in ("d", "p"))
    card, kinds = card_of(remote), KindsRead()
    for worker, geometry in zip(card.workers, remote.workers, strict=True):
        kinds.add(worker, geometry)
    layout = kinds.layout(remote.workers)
    wrong = ToldCard(replace_workers(card), outline=outlined(card, "shape", layout, (0,)))
    peer = register(TransferTopology(local, Rank(tp=3)), wrong, CardReader())
    for ask in (lambda: peer.plan, lambda: peer.pushes(Rank(tp=3)), lambda: peer.layer_reads(Rank(tp=3))):
        with pytest.raises(NotTold, match="no addresses of the peer's worker tp3") as told:
            ask()
        assert told.value.code == "KVD-GEOMETRY-NOT-TOLD"
    assert peer.pushes(Rank(tp=1)) == peer.layer_reads(Rank(tp=1)) == {}
    with pytest.raises(TopologyError, match="it has no worker tp9"):
        peer.metadata_of(Rank(tp=9))
