"""`kvctl benchmark --handshake`: two kvds of its own, simulated workers, every case measured."""

from __future__ import annotations

import json

import pytest

from kvctl.views.measuring.benchmark import quantiles
from tests.kvctl.bench.test_benchmark import benchmark
from tests.kvctl.views.test_formats import check

CASES = ["cold", "warm", "replica", "restart"]


def test_four_ranks_ask_for_two() -> None:
    pair = ("-m", "llama-3.1-8b", "--local", "tp=4", "--remote", "tp=2")
    done = benchmark("--handshake", *pair, "--rounds", "2", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    check(document)
    rows = document["measurements"]
    assert [row["case"] for row in rows] == CASES
    for row in rows:
        assert (row["local_ranks"], row["remote_ranks"], row["rounds"]) == (4, 2, 2)
        assert 0 < row["each"]["p50"] <= row["each"]["p90"] <= row["each"]["p99"]
        assert row["whole"]["p50"] >= row["each"]["p50"]
        assert row["bytes"] > 2 * 1000  # two workers' geometries and metadata
        assert row["handshakes_per_second"] == pytest.approx(4 / row["whole"]["p50"])


def test_the_table_names_sizes_and_cases() -> None:
    done = benchmark("--handshake", "-m", "llama-3.1-8b", "--rounds", "1", "-o", "wide")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[2].split()[:3] == ["RANKS", "CASE", "P50"]
    assert [line.split()[:4] for line in lines[3:]] == [["1", "x", "1", case] for case in CASES]


def test_quantiles_are_values_that_were_measured() -> None:
    found = quantiles([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (found.p50, found.p90, found.p99) == (3.0, 5.0, 5.0)
