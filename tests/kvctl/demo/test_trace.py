"""Transfers that really happened, exported from their ledger: plans made of the trace move the same bytes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.topology.compile import compile_plan
from kvd.topology.plan import plan_worker
from kvd.trace.model import block_lists, obstacles
from kvd.trace.read import read_trace
from tests.support.daemons import daemons

if TYPE_CHECKING:
    from tests.kvctl.conftest import Run


@pytest.mark.slow
def test_a_trace_of_simulated_workers_compiles_to_what_they_moved(process: Run, tmp_path: Path) -> None:
    outcome = process("demo", "--simulate", "--backend", "direct", "--keep-files")
    assert outcome.code == 0, outcome.err
    files = re.search(r"its files are in (\S+)", outcome.err)
    assert files
    [decoder] = Path(files[1]).glob("*/decode/state")
    shutil.move(decoder, tmp_path / "state")
    shutil.rmtree(files[1])
    with daemons(1, "--state-dir", str(tmp_path / "state")) as (kvd,):
        outcome = process("trace", "export", tmp_path / "t.jsonl.gz", "--runtime-dir", kvd.directory)
    assert outcome.err == "kvctl: 6 transfers between 2 engines\n"
    trace = read_trace(tmp_path / "t.jsonl.gz")
    assert not any(map(obstacles(trace), trace.transfers))
    for one in trace.transfers:
        local, remote = trace.geometries[one.local], trace.geometries[one.remote]
        [worker] = [w for w in local.workers if str(w.rank) == one.local_rank]
        plan = plan_worker(worker, local.workers, remote.workers)
        copies = compile_plan(
            plan, block_lists(one.local_blocks), block_lists(one.remote_blocks), tokens=one.tokens
        )
        moved = (sum(c.nbytes for c in copies.values()), sum(map(len, copies.values())))
        assert moved == (one.bytes, one.coalesced_descriptors)
