"""Backends by name."""

import subprocess
import sys

import pytest

from kvd.backends.errors import BackendUnavailable
from kvd.backends.registry import ADAPTERS, Adapter, available, open_backend
from tests.kvd.backends import test_contract


def test_unknown_kind_names_them_all() -> None:
    with pytest.raises(BackendUnavailable) as refused:
        open_backend("carrier-pigeon", "x", {})
    for name in ("nixl", "memory", "mooncake", "direct", "auto", "staged", "carrier-pigeon"):
        assert name in str(refused.value)


def test_available_covers_all_and_imports_none() -> None:
    assert set(available()) == {"nixl", "memory", "mooncake", "direct", "auto", "staged"}
    script = (
        "import sys; from kvd.backends.registry import available; available();"
        " assert not {'nixl', 'mooncake'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_a_backend_is_added_by_its_folder_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as line:
        line.setitem(ADAPTERS, "example", Adapter("tests.support.example_backend.backend"))
        assert available()["example"] == "built in"
        added = test_contract.Pair("example")
        for keeps in (
            test_contract.test_reads_exactly_the_named_bytes,
            test_contract.test_refusals_leave_the_lane_usable,
            test_contract.test_a_closed_lane_takes_nothing_and_harms_no_other,
            test_contract.test_unknown_option_is_named,
        ):
            added.target[:] = 0
            keeps(added)
        added.me.close()
        added.peer.close()
    assert "example" not in available()
    with pytest.raises(BackendUnavailable, match="no backend 'example'"):
        open_backend("example", "x", {})
