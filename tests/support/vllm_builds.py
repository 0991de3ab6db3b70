"""What only some builds of vLLM have, so that a test of it is skipped for the others and for no other reason."""

from __future__ import annotations

from typing import NoReturn

import pytest

from kvd.vllm.builds.versions import vllm_version

VERSION = vllm_version().partition("+")[0]


def lacks(what: str, *, last: str) -> NoReturn:
    """Skip the test, for a vLLM newer than ``last``; up to that release each has ``what``, so the test fails there."""
    if _release(VERSION) <= _release(last):
        pytest.fail(f"vLLM {VERSION} has no {what}, which builds up to {last} have")
    pytest.skip(f"vLLM {VERSION} has no {what}; builds up to {last} have")


def _release(version: str) -> tuple[int, ...]:
    """0.28.0 as (0, 28): what a release has, its fixes have too."""
    return tuple(int(part) for part in version.split(".")[:2])
