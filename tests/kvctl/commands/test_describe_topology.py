"""`kvctl describe-topology`, from the wire to the document: which pairs, and what stands in them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvd.geometry.codec import decode_worker, encode_worker
from kvd.wire import query
from kvd.wire.locality import Locality, PciDevice
from kvd.wire.transfer import LedgerRow, ListTransfers, TransferList, TransferRecord
from tests.kvctl.conftest import BLOCK, HEAD_SIZE, LAYERS, MODEL, WORKERS, engine_row

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Outcome, Run

PAGE_OF_A_HEAD = BLOCK * 2 * HEAD_SIZE * 2


def serve(daemon: FakeDaemon, *rows: query.EngineRow) -> None:
    daemon.answers[query.ListEngines] = lambda _: query.EngineList(rows=rows)


@pytest.fixture
def described(run: Run, daemon: FakeDaemon) -> Any:
    def describe(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
        outcome = run("describe-topology", *arguments, "-o", "json", "--socket", daemon.directory)
        assert outcome.code == code, outcome.err
        pairs: list[dict[str, Any]] = json.loads(outcome.out)["pairs"]
        return pairs

    return describe


def names(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(pair["local"]["engine_id"], pair["remote"]["engine_id"]) for pair in pairs]


def test_a_pair_says_who_reads_what_from_whom(described: Any) -> None:
    [pair] = described()
    assert pair["local"] | {"generation": ""} == {
        "engine_id": "decode-0",
        "generation": "",
        "model": MODEL,
        "tp": 2,
        "pp": 1,
        "dcp": 1,
        "block_sizes": [BLOCK],
    }
    assert len(pair["remote"]["generation"]) == 16
    assert pair["compatible"] is True
    [group] = pair["groups"]
    assert (group["index"], group["kind"], group["block_size"]) == (0, "full", BLOCK)
    assert (len(group["layers"]), group["bytes_per_block"]) == (LAYERS, 4 * PAGE_OF_A_HEAD)
    reads = [(r["local_rank"], r["remote_rank"], r["group"], r["heads"]) for r in pair["reads"]]
    assert reads == [
        ("tp0", "tp0", 0, [0, 2]),
        ("tp0", "tp1", 0, [2, 4]),
        ("tp1", "tp2", 0, [4, 6]),
        ("tp1", "tp3", 0, [6, 8]),
    ]
    assert {r["bytes_per_block"] for r in pair["reads"]} == {2 * PAGE_OF_A_HEAD}
    assert {f["name"]: f["ok"] for f in pair["factors"]}.items() >= {"tp": True, "plan": True}.items()


def test_bytes_of_a_local_rank_add_up_to_its_pages(described: Any) -> None:
    [pair] = described()
    for rank in ("tp0", "tp1"):
        read = sum(r["bytes_per_block"] for r in pair["reads"] if r["local_rank"] == rank)
        assert read == pair["groups"][0]["bytes_per_block"]


def test_roles_and_models_decide_the_pairs(daemon: FakeDaemon, described: Any) -> None:
    serve(
        daemon,
        engine_row("d", "decode", 1),
        engine_row("p", "prefill", 1),
        engine_row("b", "both", 1),
        engine_row("other", "prefill", 1, model="another/model"),
    )
    assert names(described()) == [("d", "p"), ("d", "b"), ("b", "p")]


def test_one_name_picks_the_pairs_that_it_is_part_of(daemon: FakeDaemon, described: Any) -> None:
    serve(daemon, engine_row("d", "decode", 1), engine_row("p", "prefill", 1), engine_row("b", "both", 1))
    assert names(described("b")) == [("d", "b"), ("b", "p")]


def test_two_names_are_compared_whatever_they_are(daemon: FakeDaemon, described: Any) -> None:
    serve(daemon, engine_row("p", "prefill", 1), engine_row("x", "prefill", 1, model="another/model"))
    [pair] = described("p", "x", code=1)
    assert names([pair]) == [("p", "x")]
    assert pair["compatible"] is False
    assert [f["name"] for f in pair["factors"] if not f["ok"]] == ["weights"]


def test_engines_that_cannot_be_mapped_are_described_and_1(daemon: FakeDaemon, described: Any) -> None:
    serve(daemon, engine_row("d", "decode", 1, heads=8), engine_row("p", "prefill", 1, heads=4))
    [pair] = described(code=1)
    assert (pair["compatible"], pair["reads"]) == (False, [])
    assert any(finding["severity"] == "error" and finding["hint"] for finding in pair["findings"])


def fails(run: Run, daemon: FakeDaemon, *arguments: str) -> Outcome:
    return run("describe-topology", *arguments, "--socket", daemon.directory)


def test_an_unknown_engine_is_wrong_usage_with_near_misses(run: Run, daemon: FakeDaemon) -> None:
    outcome = fails(run, daemon, "decode-1")
    assert outcome.code == 2
    assert "no engine 'decode-1'; did you mean decode-0" in outcome.err


def test_an_incomplete_engine_is_4_with_the_reason(run: Run, daemon: FakeDaemon) -> None:
    outcome = fails(run, daemon, "decode-0", "prefill-0")
    assert outcome.code == 4
    assert "'prefill-0' is partial, with 2 of 8 workers: 6 of 8 workers are missing" in outcome.err


def test_an_engine_that_has_gone_is_described_as_it_was_and_that_is_said(
    run: Run, daemon: FakeDaemon
) -> None:
    gone = msgspec.structs.replace(
        engine_row("p", "prefill", 2), state="gone", reason="p/tp0: process 9 ended"
    )
    serve(daemon, engine_row("d", "decode", 2), gone)
    for words in ((), ("d", "p")):
        outcome = run("describe-topology", *words, "--socket", daemon.directory)
        assert outcome.code == 0
        assert "engine 'p' is gone, and is described as it was: p/tp0: process 9 ended" in outcome.err
    serve(daemon, engine_row("d", "decode", 2), msgspec.structs.replace(gone, card=None, ranks=()))
    assert "p (prefill, Qwen/Qwen3-8B, gone) only 1 can be described" in fails(run, daemon).err
    assert fails(run, daemon, "d", "p").code == 4


def test_no_pair_is_an_empty_document_and_a_reason_on_stderr(run: Run, daemon: FakeDaemon) -> None:
    serve(daemon, engine_row("d", "decode", 1))
    outcome = run("describe-topology", "-o", "json", "--socket", daemon.directory)
    assert (outcome.code, json.loads(outcome.out)["pairs"]) == (0, [])
    assert "d (decode, Qwen/Qwen3-8B, ready)" in outcome.err
    serve(daemon)
    assert "kvd knows no engine" in fails(run, daemon).err


def test_a_geometry_that_cannot_be_read_is_1_and_names_the_worker(run: Run, daemon: FakeDaemon) -> None:
    row = engine_row("d", "decode", 1)
    assert row.card is not None
    spoilt = msgspec.structs.replace(row.card.workers[0], geometry=b"{}")
    card = msgspec.structs.replace(row.card, workers=(spoilt,))
    serve(daemon, msgspec.structs.replace(row, card=card), engine_row("p", "prefill", 1))
    outcome = fails(run, daemon)
    assert outcome.code == 1
    assert "the geometry of d/tp0 cannot be read" in outcome.err


def on_gpus(row: query.EngineRow) -> query.EngineRow:
    """The engine with its memory on GPUs."""
    assert row.card is not None
    workers = []
    for worker in row.card.workers:
        geometry = decode_worker(worker.geometry)
        regions = tuple(msgspec.structs.replace(region, device="cuda:0") for region in geometry.regions)
        there = encode_worker(dataclasses.replace(geometry, regions=regions))
        workers.append(msgspec.structs.replace(worker, geometry=there))
    return msgspec.structs.replace(row, card=msgspec.structs.replace(row.card, workers=tuple(workers)))


def moved(seconds: float) -> LedgerRow:
    return LedgerRow(
        1,
        TransferRecord(
            transfer_id="t",
            request_id="r",
            local_engine="d",
            local_rank="tp0",
            remote_engine="p",
            remote_generation="g",
            remote_request_id="r",
            backend="nixl",
            mode="pull",
            state="done",
            bytes=256 << 20,
            coalesced_descriptors=16,
            stages={"post": seconds / 2, "wire": seconds / 2},
        ),
    )


@pytest.mark.parametrize(("seconds", "codes"), [(0.5, ["SLOW_PATH"]), (0.002, [])])
def test_gpus_whose_bytes_come_through_the_host(
    daemon: FakeDaemon, described: Any, seconds: float, codes: list[str]
) -> None:
    serve(daemon, on_gpus(engine_row("d", "decode", 2)), on_gpus(engine_row("p", "prefill", 2)))
    rows = (moved(seconds), moved(seconds))
    daemon.answers[ListTransfers] = lambda _: TransferList(rows=rows, total=2)
    for arguments in ((), ("d", "p")):
        [pair] = described(*arguments)
        assert [f["code"] for f in pair["findings"] if f["code"] == "SLOW_PATH"] == codes


def test_kvd_is_not_asked_for_transfers_of_host_memory(daemon: FakeDaemon, described: Any) -> None:
    serve(daemon, engine_row("d", "decode", 2), engine_row("p", "prefill", 2))
    daemon.answers[ListTransfers] = lambda _: pytest.fail("asked for transfers")
    described()


def test_where_workers_stand_in_this_host_is_told_of_those_that_said_so(run: Run, daemon: FakeDaemon) -> None:
    gpu = PciDevice(name="NVIDIA H100", path="pci0000:15/0000:15:01.0/0000:18:00.0", numa=0)
    nic = PciDevice(name="mlx5_0", path="pci0000:15/0000:15:01.0/0000:19:00.0", numa=0)
    stands = Locality(cpus="0-47", numa=(0,), gpu=gpu, adapters=(nic,))
    daemon.answers[query.ListWorkers] = lambda _: query.WorkerList(
        rows=(msgspec.structs.replace(WORKERS[0], locality=stands), *WORKERS[1:])
    )
    told = json.loads(run("describe-topology", "-o", "json", "--socket", daemon.directory).out)
    assert told["workers"] == [
        {
            "worker": "decode-0/tp1", "gpu": "NVIDIA H100", "pci": "0000:18:00.0", "numa": [0], "cpus": "0-47",
            "adapters": {"mlx5_0": "PIX"}, "workers": {},
        }
    ]  # fmt: skip
    shown = run("describe-topology", "--socket", daemon.directory).out
    assert "decode-0/tp1  NVIDIA H100  0000:18:00.0  0     0-47  mlx5_0 (PIX)" in shown
