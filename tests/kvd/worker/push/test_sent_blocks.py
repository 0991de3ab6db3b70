"""A request's blocks as messages of a push carry them: ids, and runs of neighbours where ids are too many."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.geometry.rank import Rank
from kvd.topology.blocks import BlockList
from kvd.wire.frame import decode, encode
from kvd.wire.identity import Endpoint
from kvd.wire.limits import bytes_allowed
from kvd.wire.push import BlockRun, PushAnnounce, PushKey
from kvd.worker.push.sent_blocks import MOST_IDS, received_blocks, sent_blocks

KEY = PushKey(transfer_id="x", prefiller="p", prefiller_endpoint=Endpoint(), decoder="d", rank=Rank())
MILLION = 62_500
"""Blocks of a million tokens, 16 in each."""


def announced(lists: dict[int, BlockList]) -> PushAnnounce:
    """What arrives of an announcement of these blocks."""
    message = PushAnnounce(
        key=KEY, generations=("g", "h"), tokens=1_000_000, computed=0, blocks=tuple(sent_blocks(lists).values()),
        window=bytes(4096), seconds=60.0,
    )  # fmt: skip
    sent = encode(message, 1)
    assert len(sent) < bytes_allowed("push_announce")
    arrived, _ = decode(sent)
    assert isinstance(arrived, PushAnnounce)
    return arrived


@pytest.mark.parametrize("groups", [1, 16, 64])
def test_a_million_tokens_fit_into_an_announcement_however_many_groups_there_are(groups: int) -> None:
    """With 16 groups the ids alone had 4.8 MiB: the push was refused for good."""
    ids = np.concatenate([np.arange(70_000 + 500 * n, 70_000 + 500 * n + 250) for n in range(MILLION // 250)])
    arrived = announced({group: BlockList(group, ids) for group in range(groups)})
    assert len(arrived.blocks) == groups
    for sent in arrived.blocks:
        received = received_blocks(sent)
        assert received.first == sent.group
        np.testing.assert_array_equal(received.ids, ids)


@pytest.mark.parametrize("pool", ["every second", "pairs", "shuffled"])
def test_a_million_tokens_of_a_fragmented_pool_fit_too(pool: str) -> None:
    ids = {
        "every second": np.arange(0, 2 * MILLION, 2),
        "pairs": np.flatnonzero(np.arange(2 * MILLION) % 4 < 2),
        "shuffled": np.random.default_rng(0).permutation(MILLION) + (1 << 24) - MILLION,
    }[pool]
    arrived = announced({group: BlockList(group, ids) for group in range(20)})
    for sent in arrived.blocks:
        assert sent.count == MILLION
        np.testing.assert_array_equal(received_blocks(sent).ids, ids)


def test_what_an_older_worker_could_be_told_it_is_told_as_before() -> None:
    lists = {0: BlockList(1, np.array([7, 8, 9])), 1: BlockList(0, np.array([], np.int64))}
    assert sent_blocks(lists) == {0: BlockRun(0, 1, (7, 8, 9)), 1: BlockRun(1, 0, ())}
    most = {0: BlockList(0, np.arange(MOST_IDS))}
    assert not sent_blocks(most)[0].runs
    assert sent_blocks(most | {1: BlockList(0, np.arange(1))})[0].runs == ((0, MOST_IDS),)


def test_blocks_whose_numbers_are_too_large_to_be_packed_go_as_they_are() -> None:
    lists = {group: BlockList(0, np.arange(0, 2 * MOST_IDS, 2) + (1 << 24)) for group in range(2)}
    for group, sent in sent_blocks(lists).items():
        assert (sent.runs, sent.packed) == ((), b"")
        np.testing.assert_array_equal(received_blocks(sent).ids, lists[group].ids)
