"""What the tests of the demo share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for the demo's temporary files, short enough for sockets in it: pytest's own may be too long."""
    with tempfile.TemporaryDirectory(prefix="kvctl-test-") as folder:
        yield Path(folder)
