"""Fleets as benchmarks/fleet has them: small ones of real kvds, and what the model says of large ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.fleet.costs import Costs
from benchmarks.fleet.model import SETTINGS, predict
from benchmarks.fleet.real import LEASE_SECONDS
from benchmarks.fleet.table import Report, text
from tests.support.daemons import ROOT
from tests.support.etcds import PROGRAM

COSTS = Costs(
    idle=0.005,
    ping=0.0005,
    look=0.0005,
    introduction=0.002,
    down=0.003,
    ping_bytes=250,
    look_bytes=500,
    name_bytes=13,
    memory=44e6,
    peer_memory=30e3,
    worker_memory=2e3,
)
WARM_SECONDS = 5.0
"""Within which an engine that comes is to be warm everywhere."""
KNOWN_SECONDS = 5.0
"""Within which every host is to know of a death, whatever the size of the fleet."""


def run(tmp_path: Path, *words: str) -> Report:
    """What the command measured; what it printed are the same figures."""
    out = tmp_path / "fleet.json"
    paths = os.pathsep.join([str(ROOT / "daemon"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fleet", *words, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    assert done.stdout == text(report)
    return report


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_small_fleet_of_real_kvds_is_linked_warm_and_knows_of_its_dead(tmp_path: Path) -> None:
    etcd = ["--etcd"] if PROGRAM else []
    report = run(tmp_path, "--hosts", "3@1,8@2", *etcd, "--window", "1", "--model", "8,4096:64")
    for real in report.real:
        assert real.introductions == 2 * (real.hosts // 2) * (real.hosts - real.hosts // 2)
        assert real.messages > 0  # pings, and looks where engines changed
        died = real.death
        assert died.pairs == died.survivors * (died.killed + died.stopped)
        assert (died.unknown, died.wrongly_down) == (0, 0)
        assert died.known_most < KNOWN_SECONDS
        assert died.leases
        assert real.churn.left < WARM_SECONDS
        assert real.churn.joined < WARM_SECONDS
        assert died.lateness_most < LEASE_SECONDS
    assert report.costs is not None
    assert report.costs.idle > 0
    like_it, larger = report.model
    # Both are some hundredths of a second, measured at different times beside other work.
    assert like_it.processor == pytest.approx(report.real[-1].processor, rel=1.0)
    assert larger.known_most < KNOWN_SECONDS


@pytest.mark.slow
def test_kvctl_is_timed_on_a_fleet_of_which_some_are_silent(tmp_path: Path) -> None:
    words = ("--ask", "4", "--silent", "2", "--rounds", "1", "--only", "engines", "--only", "transfers")
    asked = run(tmp_path, *words, "--slower", "2").asked
    assert asked is not None
    assert [one.command for one in asked.commands] == ["engines", "transfers"]
    for one in asked.commands:
        assert one.unanswered >= asked.silent
        assert one.seconds > one.processor > 0


def test_what_a_host_has_to_do_grows_with_its_peers_and_not_with_the_fleet() -> None:
    small, large = predict(256, 8, COSTS, 64), predict(4096, 8, COSTS, 64)
    assert large.processor == small.processor
    assert large.memory == small.memory
    assert large.fleet_messages == 16 * small.fleet_messages
    # Half of the peers are used, and pinged each second; the others share sixteen pings.
    assert small.messages == pytest.approx(32 + 8, rel=0.1)
    assert predict(256, 8, COSTS, 128).messages == pytest.approx(64 + 8, rel=0.1)


def test_all_know_of_a_death_within_the_time_that_pings_take_to_find_out() -> None:
    for peers in (20, 64, 255):
        found = predict(4096, 8, COSTS, peers)
        assert (found.unknown, found.wrongly_down) == (0, 0)
        # The last answer was up to a second old. Who pings a host now and then is told of its silence by others.
        assert SETTINGS.down_seconds - 1.1 < found.known_median < SETTINGS.down_seconds + 0.1
        assert found.known_most < SETTINGS.down_seconds + 2 * SETTINGS.ping_seconds < KNOWN_SECONDS + 1e-9


def test_a_kvd_with_more_peers_than_it_has_time_for_calls_the_living_dead() -> None:
    found = predict(4096, 8, msgspec.structs.replace(COSTS, ping=0.005))
    assert found.processor > 1
    assert found.wrongly_down
    assert found.links_missing == found.peers - 2048


def test_the_model_says_the_same_each_time_and_in_little_time() -> None:
    began = time.process_time()
    assert predict(300, 8, COSTS) == predict(300, 8, COSTS)
    assert time.process_time() - began < 20.0
