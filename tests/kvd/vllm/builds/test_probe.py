"""What a vLLM does with failed loads is read from its source, and decides whether the connector starts.

docs/builds.md holds what was read of each version. To write it anew set WRITE_DOCS=1 and VLLM_SOURCES to a folder with
one folder a version, each holding that version's `vllm` package. Other versions' columns stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kvd.vllm.builds.probe import (
    MEANINGS,
    SCHEDULER,
    Build,
    BuildFact,
    Safety,
    completes_hits,
    probe,
    safety,
    tells_of_sleep,
)
from kvd.vllm.builds.versions import vllm_version
from kvd.vllm.errors import UnsupportedBuild
from kvd.vllm.memory.groups import GroupFacts
from tests.support.builds_matrix import CELLS, noted

PAGE = Path(__file__).parents[4] / "docs" / "builds.md"
TABLES = re.compile(r"(?<=test_probe.py` -->\n).*?(?=<!-- end -->)", re.DOTALL)
ALSO: dict[str, Callable[[Path | None], bool]] = {
    "takes a prefix of attention for a hit, whose states come with a load": completes_hits,
    "tells its connector when KV memory goes and comes (sleep mode)": tells_of_sleep,
}
"""What is asked of a version beside what decides on its loads."""

MODELS = {
    "one group of full attention or MLA": (GroupFacts("full", 16),),
    "sliding window only": (GroupFacts("sliding_window", 16, 128),),
    "sliding window beside full attention": (GroupFacts("full", 16), GroupFacts("sliding_window", 16, 128)),
    "with recurrent layers": (GroupFacts("mamba", 640), GroupFacts("full", 640)),
}
DENSE, WINDOWED, MIXED, STATEFUL = MODELS.values()

SPLIT = """
    def _mamba_block_aligned_split(self, request, n, num_external_computed_tokens=0):
        {body}
        return n
"""
SCHEDULE = """
    def schedule(self, load_kv_async, num_external_computed_tokens):
        if {test}:
            n = self._mamba_block_aligned_split(request, n, num_external_computed_tokens)
"""
BLOCKS = """
    def _handle_invalid_blocks(self, invalid):
        return [r for r in self.waiting if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
"""
FREES = """
    def _update_waiting_for_remote_kv(self, request):
        if request.request_id in self.failed_recving_kv_req_ids:
            if request.num_computed_tokens:
                self.kv_cache_manager.cache_blocks(request)
            else:
                self.kv_cache_manager.free(request)
"""
KEEPS = """
    def _update_waiting_for_remote_kv(self, request):
        if request.request_id in self.failed_recving_kv_req_ids:
            request.num_computed_tokens = 0
"""
RECEIVES = """
    def update_from_output(self, output):
        self.failed |= output.failed_recving
"""
DIVERGED = """
    def admit(self, request, hit_diverged, num_external_computed_tokens):
        if hit_diverged and num_external_computed_tokens == 0:
            {body}
"""
HANDS_ON = "output.failed_recving = results.failed_recving\n"


def source(
    root: Path,
    *,
    split: str = "pass",
    test: str = "not load_kv_async",
    frees: str = FREES,
    receives: str = RECEIVES,
    runner: str = HANDS_ON,
    runner2: str = HANDS_ON,
    aggregator: str = "Output(failed_recving=failed)\n",
) -> Path:
    """A vLLM of the few functions that are looked at."""
    scheduler = "class Scheduler:\n"
    scheduler += SPLIT.format(body=split) + SCHEDULE.format(test=test) + BLOCKS + receives + frees
    for path, text in {
        "v1/core/sched/scheduler.py": scheduler,
        "v1/worker/kv_connector_model_runner_mixin.py": runner,
        "v1/worker/gpu/kv_connector.py": runner2,
        "distributed/kv_transfer/kv_connector/utils.py": aggregator,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_build_that_handles_all_well(tmp_path: Path) -> None:
    build = probe(source(tmp_path))
    assert not build.split_asserts.holds
    assert not build.claims_wedge.holds
    assert build.takes_bad_blocks.holds
    assert build.takes_failed_requests == BuildFact(
        holds=True, evidence="update_from_output, v1/core/sched/scheduler.py:15"
    )
    assert safety(build, DENSE) == Safety("blocks")
    for groups in (WINDOWED, MIXED, STATEFUL):
        assert safety(build, groups) == Safety("request")


@pytest.mark.parametrize(
    ("fallen_back", "body"),
    [
        (True, "blocks, n = self.kv_cache_manager.get_computed_blocks(request)"),
        (False, "n = 0"),
    ],
)
def test_a_build_goes_on_without_a_state_unless_it_falls_back(
    tmp_path: Path, fallen_back: bool, body: str
) -> None:
    path = source(tmp_path) / "v1/core/sched/scheduler.py"
    assert not completes_hits(source(tmp_path / "older"))
    path.write_text(path.read_text() + DIVERGED.format(body=body))
    assert completes_hits(tmp_path) is fallen_back


def test_an_assertion_on_external_tokens_is_no_place_for_states(tmp_path: Path) -> None:
    build = probe(source(tmp_path, split="assert num_external_computed_tokens == 0"))
    assert build.split_asserts.holds
    assert "asserts that no token is external" in safety(build, STATEFUL).refused
    assert safety(build, MIXED) == Safety("request")


@pytest.mark.parametrize(
    ("asserted", "forbidden"),
    [
        ("num_external_computed_tokens == 0", True),
        ("not num_external_computed_tokens", True),
        ("num_external_computed_tokens == 0 or not self.aligned", True),
        ("n % self.block_size == 0 and num_external_computed_tokens == 0", True),
        ("num_external_computed_tokens % self.block_size == 0", False),
        ("(n + num_external_computed_tokens) % self.block_size == 0", False),
        ("num_external_computed_tokens == 0 or num_external_computed_tokens % self.block_size == 0", False),
        ("n % self.block_size == 0", False),
    ],
)
def test_an_assertion_that_asks_for_whole_blocks_forbids_nothing(
    tmp_path: Path, asserted: str, forbidden: bool
) -> None:
    build = probe(source(tmp_path, split=f"assert {asserted}"))
    assert build.split_asserts.holds is forbidden
    assert bool(safety(build, STATEFUL).refused) is forbidden


@pytest.mark.parametrize("test", ["self.aligned", "self.aligned or not load_kv_async", "load_kv_async"])
def test_an_asynchronous_claim_that_is_aligned_stops_the_queue(tmp_path: Path, test: str) -> None:
    build = probe(source(tmp_path, test=test))
    assert build.claims_wedge.holds
    assert "stops the queue" in safety(build, STATEFUL).refused


@pytest.mark.parametrize("test", ["self.aligned and not load_kv_async", "not load_kv_async"])
def test_an_asynchronous_claim_that_is_not_aligned_is_well(tmp_path: Path, test: str) -> None:
    assert not probe(source(tmp_path, test=test)).claims_wedge.holds


@pytest.mark.parametrize("loses", ["receives", "runner", "runner2", "aggregator"])
def test_one_stage_that_drops_the_report_is_enough_to_refuse_what_needs_it(
    tmp_path: Path, loses: str
) -> None:
    build = probe(source(tmp_path, **{loses: "\n"}))
    assert not build.takes_failed_requests.holds
    for groups in (WINDOWED, MIXED, STATEFUL):
        assert "would be used in silence" in safety(build, groups).refused
    assert safety(build, DENSE) == Safety("blocks")


def test_where_blocks_are_all_it_hears_of_our_scheduler_finds_the_request(tmp_path: Path) -> None:
    build = probe(source(tmp_path, receives="\n"))
    assert build.frees_failed.holds
    for groups in (WINDOWED, MIXED, STATEFUL):
        assert f"--scheduler-cls {SCHEDULER}" in safety(build, groups).refused
        assert "--scheduler-cls" in safety(build, groups, scheduler="mine.Scheduler").refused
        assert safety(build, groups, scheduler=SCHEDULER) == Safety("scheduler")
    assert safety(build, DENSE, scheduler=SCHEDULER) == Safety("blocks")


def test_our_scheduler_changes_nothing_where_requests_are_heard_of(tmp_path: Path) -> None:
    assert safety(probe(source(tmp_path)), STATEFUL, scheduler=SCHEDULER) == Safety("request")


def test_a_build_that_keeps_the_blocks_of_what_failed_is_none_for_our_scheduler(tmp_path: Path) -> None:
    build = probe(source(tmp_path, receives="\n", frees=KEEPS))
    assert not build.frees_failed.holds
    refused = safety(build, MIXED, scheduler=SCHEDULER).refused
    assert "use vLLM 0.30 or later" in refused
    assert "--scheduler-cls" not in refused


def test_an_engine_that_only_prefills_runs_on_any_build(tmp_path: Path) -> None:
    build = probe(source(tmp_path, receives="\n"))
    assert safety(build, STATEFUL, loads=False) == Safety("none")


def test_without_source_nothing_is_assumed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedBuild, match=r"scheduler\.py cannot be read"):
        probe(tmp_path)


def test_the_installed_vllm_can_load_every_kind_of_model() -> None:
    pytest.importorskip("vllm")
    build = probe()
    for groups in MODELS.values():
        assert not safety(build, groups).refused


def test_a_build_that_tells_its_connector_of_sleep(tmp_path: Path) -> None:
    base = tmp_path / "distributed/kv_transfer/kv_connector/v1/base.py"
    base.parent.mkdir(parents=True)
    base.write_text("class Base:\n    def unregister_kv_caches(self): ...\n")
    assert not tells_of_sleep(tmp_path)
    woken = tmp_path / "newer" / base.relative_to(tmp_path)
    woken.parent.mkdir(parents=True)
    woken.write_text(base.read_text() + "    def restore_kv_caches(self): ...\n")
    assert tells_of_sleep(tmp_path / "newer")


def test_the_page_is_what_the_sources_say() -> None:
    """Columns of versions whose sources are not here stay as they are; the installed one is always looked at."""
    given = os.environ.get("VLLM_SOURCES")
    roots = {path.name: path / "vllm" for path in sorted(Path(given).iterdir())} if given else {}
    if not roots:
        pytest.importorskip("vllm", reason="needs vLLM, or VLLM_SOURCES, the unpacked versions")
    columns = read_page(PAGE.read_text())
    columns |= {version: column(root) for version, root in roots.items()} or {
        vllm_version().partition("+")[0]: column(None)
    }
    now = TABLES.sub(lambda _match: tables(columns), PAGE.read_text())
    if os.environ.get("WRITE_DOCS"):
        PAGE.write_text(now)
    assert PAGE.read_text() == now


def test_what_was_run_is_noted_beside_what_was_noted_before() -> None:
    page = "before\n<!-- written by `make e2e-builds` -->\n<!-- end -->\nafter\n<!-- end -->\n"
    for version, cell, column in (
        ("0.29.0", CELLS[1], "flight"),
        ("0.26.0", CELLS[0], "killed"),
        ("0.29.0", CELLS[1], "killed"),
    ):
        page = noted(page, version, cell, column, "both")
    first, second = CELLS[0], CELLS[1]
    assert page.splitlines()[5:7] == [
        f"| 0.26.0 | {first.model} | {first.mode} | not run | not run | not run | both |",
        f"| 0.29.0 | {second.model} | {second.mode} | not run | both | not run | both |",
    ]
    assert page.startswith("before\n")
    assert page.endswith("<!-- end -->\nafter\n<!-- end -->\n")


@dataclass(frozen=True)
class Column:
    """What the page says of a version: a cell for each row of both tables, and where it was read, line by line."""

    cells: dict[str, str]
    where: dict[str, str]


def column(root: Path | None) -> Column:
    """What a version's source says; of the installed one if no root is given."""
    build = probe(root)
    facts: dict[str, BuildFact] = {MEANINGS[f.name]: getattr(build, f.name) for f in fields(Build)}
    cells = {meaning: "yes" if fact.holds else "no" for meaning, fact in facts.items()}
    cells |= {meaning: "yes" if ask(root) else "no" for meaning, ask in ALSO.items()}
    cells |= {model: _short(safety(build, groups)) for model, groups in MODELS.items()}
    return Column(cells, {meaning: fact.evidence for meaning, fact in facts.items()})


def read_page(page: str) -> dict[str, Column]:
    """The columns as they are written, by version."""
    found = TABLES.search(page)
    assert found is not None, f"{PAGE} has no tables of versions any more"
    lines = found[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:2] == "| "]
    versions = rows[0][1:]
    columns = {version: Column({}, {}) for version in versions}
    for name, *cells in rows:
        for version, cell in zip(versions, cells, strict=True):
            if name:
                columns[version].cells[name] = cell
    version = ""
    for line in lines:
        if line.startswith("**"):
            version = line.strip("*")
        elif line.startswith("- "):
            meaning, _, evidence = line[2:].partition(": ")
            columns[version].where[meaning] = evidence.strip("`")
    return columns


def tables(columns: dict[str, Column]) -> str:
    """What each version does, what follows, and where it was read."""
    columns = dict(sorted(columns.items(), key=lambda item: [int(part) for part in item[0].split(".")]))
    head = f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"

    def rows(names: Iterable[str]) -> str:
        return "".join(
            f"| {name} | {' | '.join(c.cells.get(name, 'not read') for c in columns.values())} |\n"
            for name in names
        )

    where = "".join(
        f"\n**{version}**\n\n" + "".join(f"- {meaning}: `{read}`\n" for meaning, read in c.where.items())
        for version, c in columns.items()
    )
    facts = rows([*MEANINGS.values(), *ALSO])
    return (
        f"\n{head}{facts}\nA decoder with a model:\n\n{head}{rows(MODELS)}\n## Where it was read\n{where}\n"
    )


def _short(safe: Safety) -> str:
    if safe.refused:
        return "scheduler" if SCHEDULER in safe.refused else "refused"
    return safe.channel
