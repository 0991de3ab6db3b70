"""Traces: what is written is read again, nothing of the original's places is in it, and a spoiled one is one error."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.geometry.model import Region
from kvd.topology.compile import compile_plan
from kvd.topology.plan import plan_worker
from kvd.trace.anonymous import digest, without_addresses
from kvd.trace.errors import (
    BadTrace,
    NotATrace,
    TraceCut,
    TraceError,
    TraceTooLarge,
)
from kvd.trace.model import Header, RecordedTrace, TracedBlocks, TransferLine, block_lists, obstacles
from kvd.trace.read import LIMITS, Limits, open_trace, read_trace
from kvd.trace.streams import writing
from kvd.trace.write import write_trace
from tests.support.raising import raises
from tests.support.traces import engine, transfer, write

SMALL = Limits(line_bytes=4096, geometry_bytes=4000, total_bytes=20_000, engines=4, transfers=8, items=200)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    trace = read_trace(write(tmp_path / name))
    assert trace.transfers == tuple(map(transfer, range(3)))
    assert [traced.line.engine_id for traced in trace.engines] == ["d", "p"]
    assert set(trace.geometries) == {0, 1}
    assert obstacles(trace)(trace.transfers[0]) == ""


def test_zstd_where_there_is_a_library_for_it(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t.jsonl.zst")).transfers) == 3


def test_a_trace_can_be_planned_and_compiled_again(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t"))
    one = trace.transfers[0]
    local, remote = trace.geometries[one.local], trace.geometries[one.remote]
    plan = plan_worker(local.workers[0], local.workers, remote.workers)
    copies = compile_plan(
        plan, block_lists(one.local_blocks), block_lists(one.remote_blocks), tokens=one.tokens
    )
    assert sum(part.nbytes for part in copies.values()) == one.bytes
    np.testing.assert_array_equal(block_lists(one.local_blocks)[0].ids, [1, 2, 7])


def test_transfers_can_be_read_one_by_one(tmp_path: Path) -> None:
    with open_trace(write(tmp_path / "t")) as (trace, transfers):
        assert trace.transfers == ()
        assert [t.request for t in transfers] == ["r0", "r1", "r2"]


def test_addresses_and_paths_of_the_original_are_not_in_it(tmp_path: Path) -> None:
    text = write(tmp_path / "t").read_text()
    assert str(0x7F00_1234_5000) not in text
    assert "/models" not in text
    assert read_trace(tmp_path / "t").geometries[0].model == "tiny"


def test_regions_keep_how_they_lie_to_each_other() -> None:
    geometry = engine("d").geometry
    assert geometry is not None
    [worker] = geometry.workers
    [region] = worker.regions
    size = region.length
    places = (0x7F00_0000_0000, 0x7F00_0000_0000 + size, 0x7E00_0000_0000)
    regions = tuple(Region(address, region.length, region.device) for address in places)
    apart = dataclasses.replace(geometry, workers=(dataclasses.replace(worker, regions=regions),))
    moved = without_addresses(apart).workers[0].regions
    assert moved[1].address - moved[0].address == size
    assert moved[0].address - (moved[2].address + size) > 0
    assert max(r.address for r in moved) < 1 << 30


def test_a_digest_depends_on_the_salt_of_its_trace() -> None:
    assert digest("request", b"a") == digest("request", b"a") != digest("request", b"b")


def test_what_is_written_can_be_read_whatever_a_miss_named(tmp_path: Path) -> None:
    """A miss may have been one because of its blocks."""
    parts = (
        TracedBlocks(0, 0, ((63, 9),)),
        TracedBlocks(0, 0, ((5, 2), (5, 2))),
        TracedBlocks(0, -1, ((1, 1),)),
    )
    wrong = [(part,) for part in parts]
    odd = [msgspec.structs.replace(transfer(n), local_blocks=blocks) for n, blocks in enumerate(wrong)]
    with writing(tmp_path / "t") as out:
        write_trace(out, Header(schema=1), [engine("d"), engine("p")], [*odd, transfer(3)])
    found = read_trace(tmp_path / "t").transfers
    assert [(one.cut, one.local_blocks == ()) for one in found] == [(True, True)] * 3 + [(False, False)]


def test_an_interrupted_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("old")

    def interrupted() -> None:
        with writing(path) as out:
            out.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    assert path.read_text() == "old"


def changed(line: int, change: Callable[[Any], Any]) -> Callable[[list[str]], list[str]]:
    def work(lines: list[str]) -> list[str]:
        plain = json.loads(lines[line])
        return [*lines[:line], json.dumps(change(plain)), *lines[line + 1 :]]

    return work


def blocks(*runs: list[int], side: str = "local_blocks") -> Callable[[list[str]], list[str]]:
    return changed(-2, lambda plain: {**plain, side: [[0, 0, runs]]})


def setting(number: int, **values: object) -> Callable[[list[str]], list[str]]:
    return changed(number, lambda plain: {**plain, **values})


SPOILED: dict[str, tuple[Callable[[list[str]], list[str]], str, str]] = {
    "empty": (lambda _: [], "KVD-TRACE-NONE", "empty"),
    "something else": (lambda _: ["hello"], "KVD-TRACE-NONE", "no trace"),
    "a newer schema": (setting(0, schema=7), "KVD-TRACE-VERSION", "schema 7; this version reads 1"),
    "no schema": (changed(0, lambda _: {"line": "trace"}), "KVD-TRACE-VERSION", "schema None"),
    "cut after a line": (lambda lines: lines[:-2], "KVD-TRACE-CUT", "ends after line 7"),
    "cut in the geometry": (lambda lines: lines[:2], "KVD-TRACE-CUT", "worker 0 of 1"),
    "a transfer left out": (
        lambda lines: lines[:-2] + lines[-1:],
        "KVD-TRACE-CUT",
        "3 transfers were written, 2",
    ),
    "two traces": (lambda lines: lines + lines, "KVD-TRACE-BAD", "follows the last line"),
    "no json": (lambda lines: [*lines[:-2], "{", lines[-1]], "KVD-TRACE-BAD", "line 8"),
    "an unknown line": (setting(-2, line="request"), "KVD-TRACE-BAD", "request"),
    "a line out of place": (
        lambda lines: [*lines[:6], lines[1], *lines[6:]],
        "KVD-TRACE-BAD",
        "'engine' where",
    ),
    "deep nesting": (lambda lines: [*lines[:-2], "[" * 3000, lines[-1]], "KVD-TRACE-BAD", "line 8"),
    "negative ids": (blocks([-1, 2]), "KVD-TRACE-BAD", ">= 0"),
    "negative counts": (blocks([1, -2]), "KVD-TRACE-BAD", ">= 1"),
    "ids beyond the memory": (blocks([63, 2]), "KVD-TRACE-BAD", "blocks 63 to 64, the engine has 64"),
    "a billion blocks": (blocks([0, 1_000_000_000]), "KVD-TRACE-BAD", "<= 4194304"),
    "a billion blocks in runs": (blocks(*[[0, 4194304]] * 250), "KVD-TRACE-LARGE", "1048576000 local blocks"),
    "a block twice": (blocks([5, 2], [6, 1]), "KVD-TRACE-BAD", "block 6 stands there twice"),
    "another group": (
        changed(-2, lambda plain: {**plain, "remote_blocks": [[3, 0, [[1, 1]]]]}),
        "KVD-TRACE-BAD",
        "remote group 3: the engine has 1",
    ),
    "a group twice": (
        changed(-2, lambda plain: {**plain, "local_blocks": [[0, 0, []], [0, 0, []]]}),
        "KVD-TRACE-BAD",
        "two local lists of one group",
    ),
    "an engine that is not there": (setting(-2, remote=2), "KVD-TRACE-BAD", "number 2 of 2"),
    "a negative engine": (setting(-2, local=-1), "KVD-TRACE-BAD", ">= 0"),
    "an id of 2**70": (setting(-2, tokens=2**70), "KVD-TRACE-BAD", "line 8"),
    "a geometry that contradicts itself": (
        changed(2, lambda plain: {**plain, "geometry": {**plain["geometry"], "num_blocks": 10**12}}),
        "KVD-TRACE-BAD",
        "line 3: the geometry cannot be used",
    ),
    "too many workers": (setting(1, workers=65_537), "KVD-TRACE-BAD", "line 2"),
    "one rank twice": (
        lambda lines: setting(1, workers=2)([*lines[:3], *lines[2:]]),
        "KVD-TRACE-BAD",
        "two workers of one rank",
    ),
    "a long line": (
        lambda lines: [*lines[:-2], " " * 5000, lines[-1]],
        "KVD-TRACE-LARGE",
        "more than 4096 bytes",
    ),
    "many transfers": (
        lambda lines: [*lines[:-1], *[lines[-2]] * 30, lines[-1]],
        "KVD-TRACE-LARGE",
        "more than 8 transfers",
    ),
    "many runs": (
        blocks(*[[n % 64, 1] for n in range(180)], side="remote_blocks"),
        "KVD-TRACE-LARGE",
        "more than 200 runs",
    ),
    "many stages": (
        setting(-2, stages=dict.fromkeys(map(str, range(33)), 0.0)),
        "KVD-TRACE-BAD",
        "length <= 32",
    ),
    "many facts": (
        setting(1, facts=dict.fromkeys(map(str, range(257)), 0)),
        "KVD-TRACE-BAD",
        "length <= 256",
    ),
    "many ranks": (setting(-2, remote_ranks=["a"] * 180), "KVD-TRACE-LARGE", "more than 200 runs"),
    "many engines": (
        lambda lines: [lines[0], *[lines[1].replace('"workers":1', '"workers":0')] * 5, *lines[3:]],
        "KVD-TRACE-LARGE",
        "more than 4 engines",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_trace_is_one_error_that_says_where(tmp_path: Path, what: str) -> None:
    spoil, code, said = SPOILED[what]
    path = tmp_path / "trace"
    lines = write(path).read_text().splitlines()
    path.write_text("".join(line + "\n" for line in spoil(lines)))
    with raises(code) as error:
        read_trace(path, SMALL)
    assert said in error.value.message
    assert str(path) in error.value.message
    assert len(error.value.message) < 600


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_at_any_byte_is_an_error(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path / ("t.gz" if packed else "t"))
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 23):
        path.write_bytes(whole[:end])
        with pytest.raises((TraceCut, NotATrace, BadTrace)):
            read_trace(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(NotATrace, match=f"{path} cannot be read"):
            read_trace(path)


def test_a_gigabyte_packed_into_a_megabyte_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb") as out:
        out.write(write(tmp_path / "t").read_bytes())
        for _ in range(128):
            out.write(bytes(8 << 20))
    tracemalloc.start()
    with raises("KVD-TRACE-LARGE"):
        read_trace(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 << 20


def test_the_most_that_is_taken_has_its_bound_in_memory(tmp_path: Path) -> None:
    """Dicts of short names are what takes most memory for its bytes."""
    path = tmp_path / "t"
    lines = write(path).read_text().splitlines()
    stages = {f"{n}": 0.5 for n in range(32)}
    hostile = json.dumps({**json.loads(lines[-2]), "stages": stages, "moments": stages})
    path.write_text("".join(f"{line}\n" for line in [*lines[:-1], *[hostile] * 2000]))
    tracemalloc.start()
    with pytest.raises(TraceTooLarge):
        read_trace(path, Limits(items=100_000))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100_000 * 300


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)
FIELDS = st.sampled_from(TransferLine.__struct_fields__)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    line=st.integers(0, 8),
    name=FIELDS | st.text(max_size=10),
    value=plain,
    cut=st.none() | st.integers(0, 3000),
)
def test_whatever_stands_in_a_trace_it_is_read_or_refused(
    tmp_path: Path, line: int, name: str, value: object, cut: int | None
) -> None:
    path = tmp_path / "trace"
    lines = write(path).read_text().splitlines()
    lines[line % len(lines)] = json.dumps({**json.loads(lines[line % len(lines)]), name: value})
    path.write_bytes("".join(line + "\n" for line in lines).encode()[:cut])
    found = _read_or_refused(path)
    if found is not None:
        assert len(found.transfers) == 3
        for one in found.transfers:
            block_lists(one.local_blocks)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), place=st.integers(0, 3000), packed=st.booleans())
def test_bytes_that_were_overwritten_are_read_or_refused(
    tmp_path: Path, data: bytes, place: int, packed: bool
) -> None:
    path = write(tmp_path / ("t.gz" if packed else "t"))
    whole = bytearray(path.read_bytes())
    place %= len(whole)
    whole[place : place + len(data)] = data
    path.write_bytes(whole)
    _read_or_refused(path)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(st.tuples(st.integers(-2, 2**63), st.integers(-2, 2**63)), max_size=6),
    first=st.integers(-1, 2**45),
    group=st.integers(-1, 5000),
)
def test_whatever_blocks_are_named_those_that_are_taken_fit_in_memory(
    tmp_path: Path, runs: list[tuple[int, int]], first: int, group: int
) -> None:
    path = tmp_path / "trace"
    lines = write(path).read_text().splitlines()
    # Of an engine that the recording kvd did not know, nothing bounds the ids but what a trace takes at all.
    unknown = [lines[0], *(lines[n].replace('"workers":1', '"workers":0') for n in (1, 3)), *lines[5:]]
    path.write_text(
        "".join(
            f"{x}\n" for x in changed(-2, lambda p: {**p, "local_blocks": [[group, first, runs]]})(unknown)
        )
    )
    found = _read_or_refused(path)
    if found is not None:
        assert (
            sum(len(found.ids) for found in block_lists(found.transfers[-1].local_blocks).values()) <= 1 << 22
        )


def _read_or_refused(path: Path) -> RecordedTrace | None:
    try:
        return read_trace(path, LIMITS)
    except TraceError:
        return None


def test_a_device_a_pipe_and_a_link_stay_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe)
    assert b'"end"' in os.read(end, 1 << 20).splitlines()[-1]
    os.close(end)
    assert pipe.is_fifo()
    (link := tmp_path / "link").symlink_to(tmp_path / "file")
    write(link)
    assert link.is_symlink()
    assert len(read_trace(tmp_path / "file").transfers) == 3
    (full := tmp_path / "full").symlink_to("/dev/full")
    with raises("KVD-TRACE", match="No space left on device"):
        write(full)
    assert Path("/dev/full").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link", "pipe"]
