"""The pairs that pushes are received in. The sources may take as long as they like to fall quiet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.worker.push import receiver as arriving
from tests.support.rigs.push import FAR, PushRig, Quiet


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushRig]:
    """One worker on each side."""
    monkeypatch.setattr(arriving, "QUIESCE_SECONDS", FAR)
    made = PushRig()
    yield made
    made.close()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushRig]:
    """Two prefilling workers, each of which supplies one head."""
    monkeypatch.setattr(arriving, "QUIESCE_SECONDS", FAR)
    made = PushRig(prefill_tp=2)
    yield made
    made.close()


@pytest.fixture
def quiet_seconds(monkeypatch: pytest.MonkeyPatch) -> Quiet:
    """Sets how many seconds the sources may take."""
    return lambda seconds: monkeypatch.setattr(arriving, "QUIESCE_SECONDS", seconds)
