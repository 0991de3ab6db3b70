"""`kvctl replay` from end to end: a trace of a real pair of geometries, real processes and backends, every byte."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvctl.bench.cases import requests
from kvctl.bench.recorded import batches, recorded
from kvctl.engines.sources import planned
from kvd.trace.model import EngineLine, Header, RecordedTrace, TracedBlocks, TracedEngine, TransferLine
from kvd.trace.streams import writing
from kvd.trace.write import write_trace
from tests.kvctl.views.test_formats import check

if TYPE_CHECKING:
    from kvd.geometry.model import EngineGeometry
    from kvd.topology.blocks import BlockList
    from tests.kvctl.conftest import Run

TOKENS = 96
STAGES = {"queued": 0.001, "handshake": 0.0, "plan": 0.001, "post": 0.002, "wire": 0.004}


def engine(options: str) -> EngineGeometry:
    return planned("llama-3.1-8b", f"{options},num_blocks=64")


def runs(blocks: dict[int, BlockList]) -> tuple[TracedBlocks, ...]:
    return tuple(
        TracedBlocks(group, of.first, tuple((int(number), 1) for number in of.ids))
        for group, of in blocks.items()
    )


def transfer(number: int, local: EngineGeometry, remote: EngineGeometry, **other: Any) -> TransferLine:
    """Transfers 0 and 2 have the same blocks, 1 and 3 too."""
    one = requests(local.workers[0], remote.workers[0], TOKENS, 2, "random")[number % 2]
    facts = {
        "transfer": f"r{number}@tp0",
        "request": f"r{number}",
        "local": 0,
        "remote": 1,
        "local_rank": "tp0",
        "remote_ranks": ("tp0",),
        "backend": "direct",
        "at": number / 100,
        "tokens": TOKENS,
        "bytes": TOKENS * 32 * 512,
        "descriptors": 192,
        "local_blocks": runs(one.reader),
        "remote_blocks": runs(one.source),
        "stages": STAGES,
    }
    return TransferLine(**{**facts, **other})


def write(path: Path, *transfers: dict[str, Any], local: str = "tp=8", remote: str = "tp=4") -> Path:
    ends = engine(local), engine(remote)
    traced = [TracedEngine(EngineLine(engine_id=e.engine_id, generation="g"), e) for e in ends]
    with writing(path) as out:
        made = [transfer(number, *ends, **other) for number, other in enumerate(transfers)]
        write_trace(out, Header(schema=1), traced, made)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four transfers that can be replayed and two that cannot."""
    missed, pushed = {"state": "miss"}, {"remote_blocks": (), "mode": "push"}
    return write(tmp_path / "trace.jsonl", {}, {}, {}, {}, missed, pushed)


def replayed(run: Run, *arguments: object) -> dict[str, Any]:
    outcome = run("replay", *arguments, "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    document: dict[str, Any] = json.loads(outcome.out)
    check(document)
    return document


def test_every_transfer_is_moved_at_its_time_and_compared(run: Run, trace: Path) -> None:
    document = replayed(run, trace)
    [variant] = document["variants"]
    assert (variant["name"], variant["transfers"], variant["verified"]) == ("direct", 4, True)
    assert variant["bytes"] == document["recorded"]["bytes"] == 4 * TOKENS * 32 * 512
    assert variant["dominant"] in variant["stages"]
    assert document["recorded"]["stages"]["wire"]["p50"] == 0.004
    assert document["pace"] == "at the original times: 30.0 ms of record"
    assert sorted((one["transfers"], one["reason"].split()[0]) for one in document["left_out"]) == [
        (1, "that"),
        (1, "whose"),
    ]


@pytest.mark.parametrize("backend", ["nixl", "direct"])
def test_pushes_are_written_where_the_backend_can(run: Run, tmp_path: Path, backend: str) -> None:
    if backend == "nixl":
        pytest.importorskip("nixl")
    trace = write(tmp_path / "pushes.jsonl", {"mode": "push"}, {"mode": "push"}, {})
    document = replayed(run, trace, "--backend", backend, "--concurrency", "2")
    [variant] = document["variants"]
    assert (variant["transfers"], variant["verified"]) == (3, True)
    # A window takes nothing over shared memory, so writes go another way than reads.
    assert ("tcp/" in variant["transport"]) == (backend == "nixl")
    assert document["notes"] == [
        "2 of them are pushes: written, with direct read, in one go; recorded layer by layer while they were computed"
    ]


def test_options_stand_side_by_side(run: Run, trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    options = ("--backend", "direct", "--no-coalesce", "--env", "OMP_NUM_THREADS=2", "--concurrency", "2")
    document = replayed(run, trace, *options, "--report", report)
    names = [variant["name"] for variant in document["variants"]]
    assert names == ["direct", "direct, no coalescing", "direct, OMP_NUM_THREADS=2"]
    assert document["winner"] in names
    assert document["pace"] == "2 at a time"
    page = report.read_text()
    # Each of the four that were moved says how long it took in each way.
    again = re.findall(
        r"again: direct \S+ \S+, direct, no coalescing \S+ \S+, direct, OMP_NUM_THREADS=2 \S+ \S+<", page
    )
    assert len(again) == 4


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_nixl_and_ucx_settings(run: Run, trace: Path) -> None:
    document = replayed(run, trace, "--backend", "nixl", "--env", "UCX_TLS=tcp", "--speed", "0.5")
    names = {variant["name"]: variant["transport"] for variant in document["variants"]}
    assert list(names) == ["nixl", "nixl, UCX_TLS=tcp"]
    assert names["nixl, UCX_TLS=tcp"].find("tcp/") >= 0


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="Mooncake is not installed")
def test_mooncake(run: Run, trace: Path) -> None:
    [variant] = replayed(run, trace, "--backend", "mooncake")["variants"]
    assert (variant["backend"], variant["verified"]) == ("mooncake", True)


def test_a_smaller_scale_moves_the_last_part_of_each_prompt(run: Run, trace: Path) -> None:
    [variant] = replayed(run, trace, "--scale", "0.5")["variants"]
    assert variant["bytes"] == 4 * TOKENS * 32 * 512 // 2


def test_a_table_names_what_was_not_replayed(run: Run, trace: Path) -> None:
    outcome = run("replay", trace, "--limit", "3")
    assert (outcome.code, outcome.err) == (0, "")
    assert "not replayed: 1 that missed" in outcome.out
    assert "not replayed: 1 more than --limit" in outcome.out
    assert "% of the time is in" in outcome.out


def test_bad_input_is_one_line_that_says_what_to_do(run: Run, trace: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(trace.read_bytes()[:-40])
    nothing = write(tmp_path / "nothing.jsonl", {"state": "miss"})
    for arguments, code, words in (
        (("nobody",), 2, "no trace 'nobody'"),
        ((cut,), 1, "breaks off"),
        ((nothing,), 1, "no transfer of the trace can be replayed: 1 that missed"),
        ((trace, "--memory", "1MiB"), 1, "--memory allows 1.00 MiB"),
        ((trace, "--scale", "2"), 2, "'2' is no share"),
        ((trace, "--speed", "0"), 2, "'0' is no speed"),
        ((trace, "--speed", "2", "--concurrency", "2"), 2, "give one of them"),
        ((trace, "--env", "UCX_TLS"), 2, "write --env UCX_TLS=tcp"),
        ((trace, "--to", "other:host"), 2, "is no HOST[:PORT]"),
        ((trace, "--report", "/nonexistent/report.html"), 2, "/nonexistent is no folder"),
    ):
        outcome = run("replay", *arguments)
        assert (outcome.code, outcome.out) == (code, ""), arguments
        assert words in outcome.err
        assert outcome.err.count("\n") == 1


def traced(*transfers: TransferLine, local: EngineGeometry, remote: EngineGeometry) -> RecordedTrace:
    engines = tuple(
        TracedEngine(EngineLine(engine_id=e.engine_id, generation="g"), e) for e in (local, remote)
    )
    return RecordedTrace(Header(schema=1), engines, transfers)


def test_memory_is_taken_only_for_the_blocks_in_use_and_neighbours_stay_neighbours() -> None:
    local, remote = engine("tp=8"), engine("tp=4")
    far = transfer(
        0,
        local,
        remote,
        tokens=64,
        local_blocks=(TracedBlocks(0, 0, ((3, 2), (40, 2))),),
        remote_blocks=(TracedBlocks(0, 0, ((60, 4),)),),
    )
    [stream] = recorded(traced(far, local=local, remote=remote), 10, 1.0).streams
    [request] = stream.requests
    mine, theirs = request.reader[0].ids.tolist(), request.source[0].ids.tolist()
    assert [b - a for a, b in pairwise(mine)] == [1, 2, 1]
    assert [b - a for a, b in pairwise(theirs)] == [1, 1, 1]
    assert stream.scene.reader.num_blocks <= 7
    assert max(mine) < stream.scene.reader.num_blocks


def test_a_batch_fills_no_block_twice() -> None:
    local, remote = engine("tp=8"), engine("tp=4")
    made = [transfer(number, local, remote) for number in range(5)]
    [stream] = recorded(traced(*made, local=local, remote=remote), 10, 1.0).streams
    assert [list(batch) for batch in batches(stream, 256, 20.0)] == [[0, 1], [2, 3], [4]]
    assert [list(batch) for batch in batches(stream, 1, 20.0)] == [[0], [1], [2], [3], [4]]
    assert [list(batch) for batch in batches(stream, 256, 0.001)] == [[0], [1], [2], [3], [4]]


def test_the_example_from_real_engines_is_moved_whole(run: Run) -> None:
    example = Path(__file__).parents[3] / "examples" / "traces" / "gdn-tp1-to-tp2.jsonl.gz"
    document = replayed(run, example, "--backend", "direct", "--concurrency", "4")
    [variant] = document["variants"]
    assert (variant["transfers"], variant["verified"], document["left_out"]) == (16, True, [])
    assert variant["bytes"] == document["recorded"]["bytes"]
