"""The four invariants of planning, over random pairs of engines, checked byte by byte."""

from __future__ import annotations

import os
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.geometry.model import EngineGeometry, Group
from kvd.topology.blocks import BlockList
from tests.support import oracle
from tests.support import random_engines as engines

BLOCKS = 24
EXAMPLES = {"ci": 500, "nightly": 50_000, "quick": 200}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
THOROUGH = settings(
    max_examples=EXAMPLES.get(PROFILE, EXAMPLES["ci"]),
    deadline=None,  # the machine that runs this is shared
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    print_blob=True,
)


@st.composite
def cases(
    draw: st.DrawFn, *, keeps: bool = False, by_tp: bool = False
) -> tuple[EngineGeometry, EngineGeometry, int, oracle.Request]:
    """With ``keeps`` the remote side may still have blocks from before a window. ``by_tp`` as of `engines.engine`."""
    model = draw(engines.models())
    local, remote = (engines.engine(draw, name, model, BLOCKS, by_tp=by_tp) for name in ("local", "remote"))
    return (
        local,
        remote,
        draw(st.integers(0, len(local.workers) - 1)),
        _request(draw, local, remote, keeps=keeps),
    )


def _request(
    draw: st.DrawFn, local: EngineGeometry, remote: EngineGeometry, *, keeps: bool = False
) -> oracle.Request:
    """A request of so many tokens that the blocks of all groups fit, some of it known to the local side already."""
    groups = (*local.workers[0].groups, *remote.workers[0].groups)
    smallest = min((g.block_size for g in groups if g.kind != "mamba"), default=1)
    room = BLOCKS // max(len(local.workers[0].groups), len(remote.workers[0].groups))
    tokens = draw(st.integers(1, smallest * room))
    known = draw(st.integers(0, tokens - 1))
    states = draw(st.integers(1, 2))
    patterns = st.sampled_from(("ascending", "descending", "gaps", "random"))
    dice = Random(draw(st.integers(0, 9)))
    drop, left = draw(st.booleans()), not keeps or draw(st.booleans())
    return oracle.Request(
        local=_blocks(local.workers[0].groups, tokens, known, states, draw(patterns), dice, drop=drop),
        remote=_blocks(remote.workers[0].groups, tokens, 0, states, draw(patterns), dice, drop=left),
        tokens=tokens,
        computed=known,
    )


def _blocks(
    groups: tuple[Group, ...],
    tokens: int,
    known: int,
    states: int,
    pattern: str,
    dice: Random,
    *,
    drop: bool,
) -> dict[int, BlockList]:
    """Distinct ids for all groups, since groups may stand in the same bytes; with ``drop`` only those in the window."""
    pool = list(range(BLOCKS))
    if pattern == "descending":
        pool.reverse()
    elif pattern == "gaps":
        # Ascending, but with gaps: runs of adjacent blocks that are not runs on the other side.
        first = dice.randrange(BLOCKS)
        pool = sorted(pool, key=lambda block: ((block - first) % 3 == 0, block))
    elif pattern == "random":
        dice.shuffle(pool)
    given: dict[int, BlockList] = {}
    for group in groups:
        if group.kind == "mamba":
            first, count = 0, states
        else:
            start = known
            if drop and group.kind == "sliding_window" and group.window:
                start = max(start, tokens - group.window)
            if drop and group.kind == "chunked" and group.window:
                start = max(start, (tokens - 1) // group.window * group.window)
            first = start // group.block_size
            count = -(-tokens // group.block_size) - first
        given[group.index] = BlockList(first, np.array([pool.pop(0) for _ in range(count)], np.int64))
    return given


@pytest.mark.timeout(7200 if PROFILE == "nightly" else 600)
@THOROUGH
@given(cases(keeps=True))
def test_every_needed_byte_is_written_once_and_is_right(
    case: tuple[EngineGeometry, EngineGeometry, int, oracle.Request],
) -> None:
    """And every other byte of the request's blocks that a kernel may read is zero, or was here before."""
    oracle.check(*case)
