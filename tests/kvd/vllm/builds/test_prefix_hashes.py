"""What it takes for engines to share what they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd.vllm.builds.prefix_hashes import prefix_scheme
from kvd.vllm.errors import UnsupportedBuild
from kvd.worker.settings import ConnectorSettings


def configured(
    *,
    caching: bool = True,
    algorithm: str = "sha256",
    policy: str = "recompute",
    hosts: int = 1,
    hisparse: object = None,
) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=caching, prefix_caching_hash_algo=algorithm),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        parallel_config=SimpleNamespace(nnodes_within_dp=hosts),
        attention_config=SimpleNamespace(hisparse_config=hisparse),
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"caching": False}, "prefix caching is off"),
        ({"algorithm": "xxhash"}, "it must be sha256 or sha256_cbor"),
        ({"policy": "fail"}, 'kv_load_failure_policy must be "recompute"'),
        ({"hosts": 2}, "workers on several hosts"),
        ({"hisparse": object()}, "HiSparse is on"),
    ],
)
def test_an_engine_that_cannot_share_says_why(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedBuild, match=f'prefixes is "on" and .*{said}'):
        prefix_scheme(configured(**wrong), ConnectorSettings(prefixes="on"))


def test_nor_one_whose_peers_see_copies_alone() -> None:
    with pytest.raises(UnsupportedBuild, match="backend staged shows peers copies alone"):
        prefix_scheme(configured(), ConnectorSettings(prefixes="on", backend="staged"))


def test_one_that_is_not_to_share_may_have_all_of_it() -> None:
    assert prefix_scheme(configured(caching=False, hisparse=object()), ConnectorSettings()) == ""
