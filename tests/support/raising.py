"""Errors by their code: what `kvctl explain` says of a code is true of the error that a test saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvd.errors import KvdError


@contextmanager
def raises(code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[KvdError]]:
    """Like `pytest.raises`, for the error that has exactly this code."""
    with pytest.raises(KvdError, match=match) as caught:
        yield caught
    assert caught.value.code == code
