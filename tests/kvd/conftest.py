"""What several tests of the connector share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvd.client.session import SessionState
from tests.support.rigs.bench import ready
from tests.support.rigs.pull import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Two workers; the decoding one knows the prefilling one already."""
    made = Rig()
    made.script.push(ready(made.card))
    yield made
    made.close()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is looked for meanwhile: in a process that is full of tests that makes a turn of a loop long."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def away() -> SessionState:
    """The state of a session whose kvd was killed."""
    return SessionState(connected=False, kvd_generation="k-1", engine_generation="gen-1", host="me", port=9)
