"""A kvd that users of one group share, for a module of attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemons import Daemon
from tests.support.other_user import shared_kvd


@pytest.fixture(scope="module")
def host() -> Iterator[Daemon]:
    with shared_kvd(KVD_LIVENESS_SILENT_SECONDS="100", KVD_LIVENESS_GONE_SECONDS="1000") as kvd:
        yield kvd
