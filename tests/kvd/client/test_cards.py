"""Cards in outline as a worker reads them: what it knows already costs nothing, and what cannot be is named."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvd.client.cards import CardReader
from kvd.geometry import alike
from kvd.geometry.codec import encode_worker
from kvd.geometry.errors import BadGeometry
from kvd.geometry.model import Region, UntoldWorker, WorkerGeometry
from kvd.geometry.rank import Rank
from kvd.service.peers.comparer.exchange import KindsRead
from kvd.wire.card_parts import ToldCard, outlined
from kvd.wire.handshake import CardOutline, EngineLayout
from kvd.wire.identity import EngineCard
from tests.support.daemons import facts, worker
from tests.support.samples import engine, llama

P = engine("p", ("full", 16, None, llama(("layers.0", "layers.1"))), tp=4)
LAYOUT = msgspec.msgpack.Decoder(EngineLayout)


def card(workers: tuple[WorkerGeometry, ...] = P.workers) -> EngineCard:
    engine_facts = facts("p", tp=4)
    return EngineCard(
        engine=engine_facts,
        generation="g",
        workers=tuple(
            msgspec.structs.replace(worker(engine_facts, one.rank.tp).card, geometry=encode_worker(one))
            for one in workers
        ),
    )


def outline(workers: tuple[WorkerGeometry, ...] = P.workers, shape: str = "shape") -> CardOutline:
    whole, kinds = card(workers), KindsRead()
    for one, geometry in zip(whole.workers, workers, strict=True):
        kinds.add(one, geometry)
    made = outlined(whole, shape, kinds.layout(workers), (2,))
    assert made is not None
    return made


def told(made: CardOutline) -> ToldCard:
    return ToldCard(msgspec.structs.replace(card(), workers=()), outline=made)


def test_partners_are_read_in_full_and_of_others_all_but_addresses() -> None:
    geometry = CardReader().geometry(told(outline()))
    assert geometry.workers[2] == P.workers[2]
    assert [(type(one), one.rank, one.num_blocks, one.groups) for one in geometry.workers[:2]] == [
        (UntoldWorker, one.rank, one.num_blocks, one.groups) for one in P.workers[:2]
    ]
    assert geometry.facts["backend"] == card().workers[0].backend
    assert CardReader().metadata(told(outline())) == {Rank(tp=2): card().workers[2].metadata}


def elsewhere(one: WorkerGeometry) -> WorkerGeometry:
    regions = tuple(Region(r.address + (1 << 40), r.length, r.device) for r in one.regions)
    return replace(one, regions=regions)


def test_the_next_generation_and_what_is_like_one_s_own_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, own = CardReader(), CardReader(P.workers)
    reader.geometry(told(outline()))
    monkeypatch.setattr(alike, "decode_worker", None)
    moved = tuple(map(elsewhere, P.workers))
    for one in (reader, own):
        geometry = one.geometry(told(outline(moved)))
        assert geometry.workers[2] == moved[2]
    more = tuple(replace(one, num_blocks=one.num_blocks - 1) for one in P.workers)
    assert own.geometry(told(outline(more, "another"))).workers[2] == more[2]


def test_of_many_layouts_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.client.cards.LAYOUTS_KEPT", 3)
    reader = CardReader()
    for number in range(10):
        reader.geometry(told(outline(shape=str(number))))
        reader.geometry(told(outline(shape="0")))
    assert list(reader._layouts) == ["8", "9", "0"]


def with_layout(**changed: object) -> CardOutline:
    made = outline()
    layout = msgspec.structs.replace(LAYOUT.decode(made.layout), **changed)
    return msgspec.structs.replace(made, layout=msgspec.msgpack.encode(layout))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (msgspec.structs.replace(outline(), layout=b"\x00"), "not the layout of an engine"),
        (with_layout(of=(0, 0, 0)), "4 workers names 4 ranks and the kinds of 3"),
        (with_layout(ranks=(Rank(),) * 4), "1 workers names 4 ranks"),
        (with_layout(ranks=(), of=()), "0 workers"),
        (with_layout(of=(0, 0, 0, 9)), "kind 9 of 4"),
        (
            with_layout(ranks=tuple(Rank(tp=tp) for tp in (0, 1, 5, 3))),
            "tells of worker tp2, its layout has 4 others",
        ),
        (
            msgspec.structs.replace(
                outline(), rows=(msgspec.structs.replace(outline().rows[0], rank=Rank(tp=1)),)
            ),
            "says rank tp1, its geometry says tp2",
        ),
    ],
)
def test_outlines_that_cannot_be_are_refused(made: CardOutline, why: str) -> None:
    with pytest.raises(BadGeometry, match=why):
        CardReader().geometry(told(made))


def test_a_kind_that_does_not_fit_into_its_memory_is_refused_also_if_its_pages_are_known() -> None:
    short = tuple(replace(one, regions=(Region(1, 64),) * len(one.regions)) for one in P.workers)
    for reader in (CardReader(), CardReader(P.workers)):
        with pytest.raises(BadGeometry, match="of a region of 64"):
            reader.geometry(told(outline(short)))
