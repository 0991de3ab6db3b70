"""Engines that forget their cached blocks."""

from __future__ import annotations

from functools import partial

from kvctl.demo.engine import EngineProcess
from tests.support.daemons import wait_for
from tests.support.engine_calls import reset_prefix_cache


def forget_prefixes(*engines: EngineProcess) -> None:
    """Have engines forget all cached blocks, once no request holds any: a lease is released a while after its load."""
    for engine in engines:
        wait_for(partial(reset_prefix_cache, engine))
