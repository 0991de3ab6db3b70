"""Cards of workers on their way to kvd: packed for a kvd that reads that, as they are for one of before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import zmq

from kvd.client.packing import packed
from kvd.client.session import KvdSession
from kvd.geometry.codec import decode_worker, encode_worker
from kvd.wire.frame import decode, encode
from kvd.wire.registration import Registered, RegisterWorker
from kvd.wire.reply import Refused
from tests.support.daemons import daemons, facts, session, worker

LAYERS = 80


def large() -> RegisterWorker:
    """A worker with many layers."""
    made = worker(facts("e"))
    one = decode_worker(made.card.geometry)
    (group,) = one.groups
    layers = tuple(dataclasses.replace(group.layers[0], name=f"model.layers.{n}.attn") for n in range(LAYERS))
    document = encode_worker(dataclasses.replace(one, groups=(dataclasses.replace(group, layers=layers),)))
    return msgspec.structs.replace(made, card=msgspec.structs.replace(made.card, geometry=document))


def test_kvd_keeps_the_document_that_was_packed() -> None:
    presented = large()
    sent = packed(presented)
    assert sent.packed
    assert len(encode(sent)) < len(encode(presented)) / 3
    with daemons() as (kvd,), session(kvd, presented) as one:
        assert one.counters["registrations.refused"] == 0
        (row,) = kvd.engines(cards=True).values()
        assert row.card is not None
        assert [card.geometry for card in row.card.workers] == [presented.card.geometry]


def test_a_small_document_is_sent_as_it_is() -> None:
    presented = worker(facts("e"))
    assert packed(presented) is presented


def test_a_kvd_of_before_gets_the_card_as_it_is_at_once_and_the_next_one_is_asked_again(
    tmp_path: Path,
) -> None:
    presented = large()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as kvd:
        kvd.linger, kvd.rcvtimeo = 0, 20_000

        def received() -> tuple[bytes, RegisterWorker, int]:
            while True:
                route, frame = kvd.recv_multipart()
                message, correlation = decode(frame)
                if isinstance(message, RegisterWorker):
                    return route, message, correlation

        kvd.bind(f"ipc://{tmp_path}/kvd.sock")
        one = KvdSession(lambda: presented, directory=tmp_path)
        try:
            for _ in range(2):
                route, message, correlation = received()
                assert message.packed
                refused = Refused(code="KVD-GEOMETRY-BAD", message="not a geometry: invalid JSON")
                kvd.send_multipart([route, encode(refused, correlation)])
                route, message, correlation = received()
                assert message == presented
                kvd.send_multipart([route, encode(Registered(kvd_generation="g"), correlation)])
                assert one.wait(lambda state: state.connected, 20).refusal is None
                assert one.counters["registrations.refused"] == 0
                kvd.unbind(f"ipc://{tmp_path}/kvd.sock")
                kvd.bind(f"ipc://{tmp_path}/kvd.sock")
        finally:
            one.close()


def test_a_bad_geometry_is_refused_packed_and_as_it_is_and_that_is_told() -> None:
    presented = large()
    bad = presented.card.geometry.replace(b'"num_blocks":8', b'"num_blocks":0')
    card = msgspec.structs.replace(presented.card, geometry=bad)
    with daemons() as (kvd,):
        one = KvdSession(lambda: msgspec.structs.replace(presented, card=card), directory=kvd.directory)
        try:
            refusal = one.wait(lambda state: state.refusal is not None, 20).refusal
            assert refusal is not None
            assert refusal.code == "KVD-GEOMETRY-BAD"
            assert "at least one block" in refusal.message
        finally:
            one.close()
