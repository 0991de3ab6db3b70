"""Some bytes of a worker are really read, by a process of kvctl's, from another process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvctl.doctor import peer_reads
from kvctl.doctor.peer_reads import ReadFrom, null_block, read_from
from kvctl.doctor.peer_transports import transport_checks
from kvd.geometry.codec import decode_worker, encode_worker
from kvd.geometry.model import Region
from kvd.wire.identity import WorkerCard
from kvd.wire.query import EngineRow
from tests.kvctl.conftest import engine_row, geometry

WORKER = geometry(0, 1)
[REGION] = WORKER.regions
HERE = "127.0.0.1"


@contextmanager
def peer(backend: str) -> Iterator[tuple[subprocess.Popen[str], WorkerCard]]:
    """A worker in a process of its own, with real memory."""
    words = [sys.executable, "-m", "tests.support.backend_peer", backend, str(REGION.length)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # Libraries print where they like.
        lines = (line for line in process.stdout if line.startswith("{"))
        told = json.loads(next(lines))
        real = dataclasses.replace(WORKER, regions=(Region(told["address"], REGION.length),))
        made = engine_row("prefill-0", "prefill", 1)
        assert made.card is not None
        card = msgspec.structs.replace(
            made.card.workers[0],
            backend=backend,
            geometry=encode_worker(real),
            metadata=bytes.fromhex(told["metadata"]),
        )
        try:
            yield process, card
        finally:
            process.kill()


def from_card(card: WorkerCard) -> ReadFrom:
    return ReadFrom(card.backend, "tcp" if card.backend == "mooncake" else "", card.metadata, card)


def test_only_block_0_is_read_which_is_no_requests() -> None:
    made = engine_row("prefill-0", "prefill", 1)
    assert made.card is not None
    rows = null_block(made.card.workers[0])
    layers = decode_worker(made.card.workers[0].geometry).groups[0].layers
    assert len(rows)
    for start, length in zip(rows.remote.tolist(), rows.length.tolist(), strict=True):
        assert any(
            REGION.address + layer.offset
            <= start
            < start + length
            <= REGION.address + layer.offset + layer.page.size
            for layer in layers
        )


@pytest.mark.parametrize("backend", ["nixl", "mooncake", "direct"])
def test_bytes_come_and_it_is_said_over_what_and_how_fast(backend: str) -> None:
    if backend != "direct":
        pytest.importorskip(backend)
    with peer(backend) as (process, card):
        read = read_from(from_card(card), HERE)
        assert process.poll() is None, "it lives on"
    assert not read.failed, read.told
    assert read.told.startswith("read ")
    assert "of prefill-0/tp0 over " in read.told
    assert "/s; the first took " in read.told


def test_a_worker_that_has_ended_cannot_be_read_and_that_is_a_failed_check() -> None:
    pytest.importorskip("nixl")
    with peer("nixl") as (process, card):
        process.kill()
        process.wait()
        theirs = row("prefill", card)
        mine = row("decode", card)
        [check] = transport_checks([mine], [theirs], "10.0.0.8:7766", lambda source: read_from(source, HERE))
    assert check.state == "failed"
    assert "nothing could be read of prefill-0" in check.found
    assert "ports of the transfer engine" in check.hint


def row(role: str, card: WorkerCard) -> EngineRow:
    made = engine_row(f"{role}-0", "prefill" if role == "prefill" else "decode", 1)
    assert made.card is not None
    return msgspec.structs.replace(made, local=True, card=msgspec.structs.replace(made.card, workers=(card,)))


def test_without_the_engine_where_kvctl_runs_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reads, "available", lambda: {"nixl": "not installed: install nixl"})
    made = engine_row("prefill-0", "prefill", 1)
    assert made.card is not None
    read = read_from(ReadFrom("nixl", "", b"", made.card.workers[0]), HERE)
    assert (read.told, read.failed) == ("not probed: nixl is not installed where kvctl runs", False)
