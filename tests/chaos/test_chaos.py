"""A short part of `make chaos`, with the seeds that every run of the tests has."""

from __future__ import annotations

import random

import pytest

from kvd.wire.frame import MESSAGES
from tests.chaos.faults import FAULTS
from tests.chaos.hostile import outcome
from tests.chaos.messages import message
from tests.chaos.run import run_fault
from tests.chaos.soak import judged
from tests.chaos.wire import NoNamespaces
from tests.support.daemons import daemons

SHORT = ("killed", "reordering", "read-only-disk", "no-runtime-directory")
HOSTILE = 50_000


@pytest.mark.e2e
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.name in SHORT], ids=lambda fault: fault.name
)
def test_all_is_back_after_a_fault_and_nothing_is_lost(fault: object) -> None:
    assert fault in FAULTS
    try:
        found = run_fault(1, FAULTS[FAULTS.index(fault)])
    except NoNamespaces as reason:
        pytest.skip(f"two hosts and a wire need root and TUN devices: {reason}")
    assert not found.broken, str(found)


@pytest.mark.e2e
def test_valid_messages_in_wrong_orders_and_amounts_do_not_fell_it() -> None:
    with daemons() as (kvd,):
        outcome(kvd, seed=1, count=HOSTILE, seconds=100.0)


def test_each_kind_of_message_is_made_and_a_seed_makes_the_same_again() -> None:
    for kind in MESSAGES:
        first, second = (message(random.Random(7), [kind]) for _ in range(2))
        assert first == second


def test_growth_is_found_below_noise_and_not_in_it() -> None:
    dice = random.Random(1)
    noisy = [100.0 + dice.uniform(-5, 5) for _ in range(600)]
    assert judged("x", noisy, 1.0).flat
    grows = judged("x", [value + 0.02 * at for at, value in enumerate(noisy)], 1.0)
    assert not grows.flat
    assert 8 < grows.grown < 11
    warm = [100.0 + min(at, 100) for at in range(600)]
    assert judged("x", warm, 1.0).flat
