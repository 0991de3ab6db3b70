"""Dynamo's table of connectors gets an entry for ours, and nothing is touched where there is none."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from kvd.vllm.dynamo import LIKE, TABLE, register

ROOT = Path(__file__).parents[3]


def installed(monkeypatch: pytest.MonkeyPatch, **contents: object) -> ModuleType:
    """A Dynamo whose module of that name has these contents."""
    for name in ("dynamo", "dynamo.vllm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    table = ModuleType(TABLE)
    vars(table).update(contents)
    monkeypatch.setitem(sys.modules, TABLE, table)
    return table


def test_ours_is_asked_as_stocks_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls, pushes = type("Pulls", (), {}), type("Pushes", (), {})
    table = installed(monkeypatch, KV_CONNECTOR_PROTOCOLS={LIKE: pulls, "MooncakeConnector": pushes})
    for _ in range(2):
        register()
    expected = {LIKE: pulls, "MooncakeConnector": pushes, "KvdConnector": pulls}
    assert expected == table.KV_CONNECTOR_PROTOCOLS


def test_an_entry_that_dynamo_has_by_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    table = installed(monkeypatch, KV_CONNECTOR_PROTOCOLS={LIKE: int, "KvdConnector": str})
    register()
    assert table.KV_CONNECTOR_PROTOCOLS["KvdConnector"] is str


@pytest.mark.parametrize("contents", [{}, {"KV_CONNECTOR_PROTOCOLS": {}}])
def test_a_dynamo_with_another_table_is_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, contents: dict[str, object]
) -> None:
    installed(monkeypatch, **contents)
    register()
    assert "it will refuse KvdConnector" in caplog.text


def test_without_dynamo_nothing_happens_and_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; from kvd.vllm.dynamo import register; register();"
        "print(sorted({'torch', 'vllm', 'dynamo'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_vllm_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["kvctl_dynamo"].partition(":")
    assert getattr(importlib.import_module(module), name) is register
