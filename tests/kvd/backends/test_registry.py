"""Backends by name."""

import subprocess
import sys

import pytest

from kvd.backends.errors import BackendUnavailable
from kvd.backends.registry import available, open_backend


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
