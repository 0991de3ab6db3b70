"""Backends by name."""

import inspect
import subprocess
import sys

import pytest

from kvd.backends.errors import BackendUnavailable
from kvd.backends.registry import ADAPTERS, Adapter, available, open_backend
from tests.kvd.backends import test_contract
from tests.support.raising import raises

CONTRACT = [
    keeps
    for name, keeps in vars(test_contract).items()
    if name.startswith("test_")
    and list(inspect.signature(keeps).parameters) == ["pair"]
    and not hasattr(keeps, "pytestmark")
]
"""Every test of the contract that asks one pair of backends, but those of what not every backend has."""


def test_unknown_kind_names_them_all() -> None:
    with raises("KVD-BACKEND-UNAVAILABLE") as refused:
        open_backend("carrier-pigeon", "x", {})
    for name in ("nixl", "memory", "mooncake", "direct", "auto", "staged", "carrier-pigeon"):
        assert name in str(refused.value)


def test_what_is_available_is_said_and_nothing_imported() -> None:
    assert set(available()) == set(ADAPTERS)
    script = (
        "import sys; from kvd.backends.registry import available; available();"
        " assert not {'nixl', 'mooncake'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_a_backend_is_added_by_its_folder_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CONTRACT) > 8
    with monkeypatch.context() as line:
        line.setitem(ADAPTERS, "example", Adapter("tests.support.example_backend.backend", reads_only=True))
        assert available()["example"] == "built in"
        for keeps in CONTRACT:
            added = test_contract.Pair("example")
            keeps(added)
            added.me.close()
            added.peer.close()
    assert "example" not in available()
    with pytest.raises(BackendUnavailable, match="no backend 'example'"):
        open_backend("example", "x", {})
