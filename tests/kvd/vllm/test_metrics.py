"""The engine's own metrics of transfers, through vLLM's real plumbing, and by stock's names through the rules."""

from __future__ import annotations

import ast
import importlib.util
import pickle
import re
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvd.worker.tally import TransferTally
from tests.kvd.worker.test_tally import record
from tests.support.promtool import promtool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # importing vLLM takes its time

RULES = Path(__file__).parents[3] / "configs" / "monitoring" / "nixl-names.yaml"
STOCK = "distributed/kv_transfer/kv_connector/v1/nixl/stats.py"
UNMAPPED = {"vllm:nixl_num_failed_notifications", "vllm:nixl_num_notifications_after_expiry"}


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    pytest.importorskip("vllm", reason="vLLM is not installed: there is nothing to give metrics to")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvd.vllm.connector  # noqa: F401 - warns once, here

        yield


def stats(*seconds: float, failed: int = 0, expired: int = 0) -> Any:
    """What a half gives for these transfers, after the way from the worker's process to the scheduler's."""
    from kvd.vllm.metrics import transfer_stats

    tally = TransferTally()
    for each in seconds:
        stages = {"post": each / 4, "wire": each * 3 / 4}
        tally.note(record(bytes=1 << 20, coalesced_descriptors=40, stages=stages))
    for _ in range(failed):
        tally.note(record(state="miss", code="TOO_LATE"))
    tally.expire(expired)
    return pickle.loads(pickle.dumps(transfer_stats(tally)))  # noqa: S301 - our own


@pytest.fixture
def scraped(monkeypatch: pytest.MonkeyPatch) -> str:
    """What Prometheus is shown of three transfers, a failure and two expired prefills."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    registry = CollectorRegistry()
    for kind in (Counter, Gauge, Histogram):
        made = type(kind.__name__, (kind,), {"__init__": _within(kind, registry)})
        monkeypatch.setattr(KVConnectorProm, f"_{kind.__name__.lower()}_cls", made)
    transfer = KVTransferConfig(
        kv_connector="KvdConnector", kv_connector_module_path="kvd.vllm", kv_role="kv_both"
    )
    config = SimpleNamespace(kv_transfer_config=transfer)
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"]})
    both = stats(0.02, 0.2, failed=1).aggregate(stats(2.0, expired=2))
    prom.observe(both.to_dict(), 0)
    return generate_latest(registry).decode()


def _within(kind: type, registry: CollectorRegistry) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        kind.__init__(self, *args, **{"registry": registry, **more})  # type: ignore[misc]

    return init


def samples(scrape: str) -> dict[str, float]:
    lines = [line for line in scrape.splitlines() if not line.startswith("#") and "_created{" not in line]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_every_observation_reaches_prometheus_with_vllms_labels(scraped: str) -> None:
    found = samples(scraped)
    labels = '{engine="0",model_name="tiny"}'
    assert found[f"vllm:kvd_xfer_time_seconds_count{labels}"] == 3
    assert found[f"vllm:kvd_xfer_time_seconds_sum{labels}"] == pytest.approx(2.22)
    assert found[f"vllm:kvd_post_time_seconds_sum{labels}"] == pytest.approx(0.555)
    assert found[f"vllm:kvd_bytes_transferred_sum{labels}"] == 3 << 20
    assert found[f"vllm:kvd_num_descriptors_sum{labels}"] == 120
    assert found[f"vllm:kvd_num_failed_transfers_total{labels}"] == 1
    assert found[f"vllm:kvd_num_kv_expired_reqs_total{labels}"] == 2
    assert found['vllm:kvd_xfer_time_seconds_bucket{engine="0",le="0.025",model_name="tiny"}'] == 1


def test_vllms_log_has_a_line_of_them() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    logged: list[str] = []
    logging = KVConnectorLogging(
        KVTransferConfig(kv_connector="KvdConnector", kv_connector_module_path="kvd.vllm", kv_role="kv_both")
    )
    logging.observe(stats(0.1, 0.3).to_dict())
    logging.observe(stats(failed=1).to_dict())
    logging.log(lambda text, *words: logged.append(text % words))
    assert len(logged) == 1
    assert "Num successful transfers=2, Avg xfer time (ms)=200.0" in logged[0]
    assert "Throughput (MB/s)=5.0" in logged[0]
    assert "Num failed transfers=1" in logged[0]


def test_below_a_multi_connector_they_are_logged_as_well() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    logged: list[str] = []
    logging = KVConnectorLogging(KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both"))
    logging.observe({"KvdConnector": stats(0.1, 0.3).to_dict()})
    logging.log(lambda text, *words: logged.append(text % words))
    assert "KvdConnector={'Num successful transfers': 2, 'Avg xfer time (ms)': 200.0" in logged[0]


def test_a_step_without_a_transfer_gives_nothing() -> None:
    from kvd.vllm.metrics import KvdTransferStats

    assert stats() is None
    assert KvdTransferStats().is_empty()
    assert stats(failed=1).reduce()["Num successful transfers"] == 0


def test_tokens_that_came_from_a_peer_are_counted_as_that() -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from kvd.vllm.connector import KvdConnector

    assert KvdConnector._cache_hit_source is CacheHitSource.P2P


def test_buckets_are_stocks() -> None:
    from kvd.vllm.metrics import _HISTOGRAMS

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    root = Path(next(iter(spec.submodule_search_locations or ())))
    theirs: list[list[float]] = []
    for node in ast.walk(ast.parse((root / STOCK).read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "buckets":
            theirs.append(list(eval(ast.unparse(node.value))))  # noqa: S307, PERF401 - a list of numbers
    times, sizes, counts = theirs
    assert {key: list(buckets) for key, (_, _, buckets) in _HISTOGRAMS.items()} == {
        "xfer_seconds": times[1:],
        "post_seconds": times,
        "bytes": sizes,
        "descriptors": counts,
    }


def rules() -> dict[str, str]:
    """What is recorded, by what it is made of."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["expr"]: rule["record"] for rule in group["rules"]}


def test_the_rules_give_every_metric_of_ours_by_the_name_that_stock_has(scraped: str) -> None:
    ours = {name.split("{")[0] for name in samples(scraped)}
    assert set(rules()) == ours
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    source = (Path(next(iter(spec.submodule_search_locations or ()))) / STOCK).read_text()
    stock = set(re.findall(r'name="(vllm:nixl_\w+)"', source))
    given = {re.sub("_(bucket|sum|count|total)$", "", name) for name in rules().values()}
    assert given == stock - UNMAPPED


def test_promtool_finds_our_transfers_by_stocks_names(scraped: str, tmp_path: Path) -> None:
    found = {name: value for name, value in samples(scraped).items() if name.startswith("vllm:kvd_")}
    by_name = rules()
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": f"{value}x3"} for name, value in found.items()],
                "promql_expr_test": [
                    {
                        "expr": _renamed(name, by_name),
                        "eval_time": "2m",
                        "exp_samples": [{"labels": _renamed(name, by_name), "value": value}],
                    }
                    for name, value in found.items()
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [promtool(), "test", "rules", str(tmp_path / "test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _renamed(series: str, by_name: dict[str, str]) -> str:
    name, brace, labels = series.partition("{")
    return by_name[name] + brace + labels
