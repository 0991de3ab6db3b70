"""Tests here are coroutines, servers and clients in one event loop each."""

from __future__ import annotations

import asyncio
import inspect

import pytest

SECONDS = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        async with asyncio.timeout(SECONDS):
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True
