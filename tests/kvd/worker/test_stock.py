"""Settings of stock connectors: taken for ours, or named as without effect, and never in the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.worker.settings import ConnectorSettings, read_settings
from kvd.worker.stock import NIXL_BACKENDS, STOCK_SETTINGS, translate
from tests.support.raising import raises

EVERYTHING: dict[str, Any] = {
    "kv_lease_duration": 60,
    "backends": ["UCX"],
    "num_threads": 8,
    "enforce_handshake_compat": False,
    "engine_ttl": 60.0,
    "bidirectional_kv_xfer": True,
    "kv_recompute_threshold": 64,
    "decoder_kv_blocks_ttl": 480,
    "push_registration_timeout": 240,
    "enable_cross_layers_blocks": "True",
    "mooncake_protocol": "tcp",
    "device_name": "mlx5_0",
    "num_workers": 10,
    "bootstrap_server_address": "10.0.0.1:8998",
}


def test_everything_that_a_stock_connector_reads_is_accepted() -> None:
    assert set(EVERYTHING) == set(STOCK_SETTINGS)
    assert read_settings(EVERYTHING) == ConnectorSettings(
        lease_seconds=60.0, push_timeout=240.0, outermost="block"
    )


def test_one_line_says_what_is_taken_for_what_and_what_has_no_effect() -> None:
    said = translate({"kv_lease_duration": 60, "num_threads": 8, "engine_ttl": 60.0, "mode": "push"}).says
    assert said.startswith("settings of stock connectors: kv_lease_duration is taken for lease_seconds; ")
    assert "without effect: num_threads (UCX gets no threads" in said
    assert "; engine_ttl (a peer is forgotten" in said
    assert "\n" not in said


@pytest.mark.parametrize("name", STOCK_SETTINGS)
def test_each_is_named(name: str) -> None:
    assert name in translate({name: EVERYTHING[name]}).says


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["UCX"], "backends is UCX, which moves KV here too"),
        (["UCX", "GDS"], "without effect: backends (GDS: it moves to files or objects, and nothing between"),
        (
            ["LIBFABRIC"],
            "without effect: backends (LIBFABRIC: what ends its late writes is not known, so KV goes by",
        ),
        (["Mooncake"], 'without effect: backends (Mooncake: "backend": "mooncake" goes by Mooncake itself)'),
        (
            ["LIBFABRICS"],
            "backends (LIBFABRICS: no plugin of NIXL that is known here; known are UCX, LIBFABRIC, ",
        ),
        ("UCX", "backends is UCX, which"),
    ],
)
def test_nixls_plugins_are_named_one_by_one(named: Any, said: str) -> None:
    assert said in translate({"backends": named}).says
    assert read_settings({"backends": named}) == ConnectorSettings()


def test_every_plugin_of_the_installed_nixl_is_known() -> None:
    found = (path for entry in sys.path for path in Path(entry).glob("*nixl*/**/libplugin_*.so"))
    plugins = {path.stem.removeprefix("libplugin_") for path in found}
    if not plugins:
        pytest.skip("NIXL is not installed: nothing to compare with")
    assert plugins - set(NIXL_BACKENDS) == set()


def test_nothing_is_said_of_settings_of_ours() -> None:
    assert translate({"lease_seconds": 5, "backend": "mooncake"}).says == ""


def test_mooncakes_settings_are_options_of_that_backend() -> None:
    extra = {"backend": "mooncake", "mooncake_protocol": "tcp", "backend_options": {"in_flight": 8}}
    assert read_settings(extra).backend_options == {"in_flight": 8, "protocol": "tcp"}
    assert "mooncake_protocol is taken for protocol of backend_options" in translate(extra).says


@pytest.mark.parametrize(("joined", "outermost"), [(True, "block"), ("true", "block"), (False, "layer")])
def test_blocks_across_layers_are_blocks_outermost(joined: Any, outermost: str) -> None:
    assert read_settings({"enable_cross_layers_blocks": joined}).outermost == outermost


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"kv_lease_duration": 60, "lease_seconds": 30},
            "kv_lease_duration and lease_seconds mean the same; leave one of them out",
        ),
        (
            {"backend": "mooncake", "mooncake_protocol": "tcp", "backend_options": {"protocol": "rdma"}},
            "mooncake_protocol and protocol of backend_options mean the same",
        ),
        ({"kv_lease_duration": "60s"}, "kv_lease_duration is '60s'; it must be a number from 0.1"),
        (
            {"leese_seconds": 3},
            "leese_seconds is no setting; did you mean lease_seconds? there are runtime_dir",
        ),
        ({"kv_lease_durations": 3}, "kv_lease_durations is no setting; did you mean kv_lease_duration?"),
        ({"x": 3}, "x is no setting; there are runtime_dir"),
        ({"backend": "mooncake", "mooncake_protocol": "tcp", "backend_options": 3}, "backend_options is 3"),
    ],
)
def test_a_contradiction_or_a_slip_stops_the_engine(extra: dict[str, Any], said: str) -> None:
    with raises("KVD-CONNECTOR-SETTINGS") as raised:
        read_settings(extra)
    assert said in str(raised.value)
