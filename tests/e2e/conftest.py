"""Deployments that are kept for a whole module of tests: starting engines is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvctl.demo.deployment import Deployment
from tests.support.deployments import running


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("llama", tmp_path_factory.mktemp("llama")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def gdn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running("qwen3.5-gdn", tmp_path_factory.mktemp("gdn")) as deployment:
        yield deployment
