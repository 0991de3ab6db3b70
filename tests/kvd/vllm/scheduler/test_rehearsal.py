"""A decoder's first request, gone through before it comes: for every kind of cache."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.vllm.scheduler import rehearsal
from kvd.vllm.scheduler.rehearsal import TIMES, TOKENS, rehearse, try_rehearsal
from kvd.wire.frame import encode
from kvd.wire.lease import LeaseClaim, LeaseRelease
from kvd.worker.settings import ConnectorSettings
from tests.support.rigs.bench import MLAAttentionSpec, SlidingWindowSpec, cache_config, full, gdn, groups_of

LARGE = 1 << 17
"""A state's block, which has a whole prompt."""
SPECS: dict[str, tuple[Any, ...]] = {
    "dense": (full(16),),
    "latents": (MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, head_size_v=8),),
    "windows": (
        full(16),
        SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=4, head_size_v=4, sliding_window=64),
    ),
    "states": (full(528), gdn(LARGE)),
    "states alone": (gdn(LARGE),),
}


@pytest.mark.parametrize("specs", SPECS.values(), ids=list(SPECS))
def test_it_goes_as_far_as_the_order_of_a_load(specs: tuple[Any, ...]) -> None:
    groups = groups_of(cache_config(10, *((spec, (f"layer{i}",)) for i, spec in enumerate(specs))))
    order = rehearse(ConnectorSettings(), groups)
    assert order.tokens == TOKENS - 1
    assert not order.refused
    assert order.unanswered, "as the first request's load begins beside its claim"
    assert set(order.groups) == set(range(len(specs)))
    assert order.block_ids


@pytest.mark.parametrize(
    "settings",
    [
        ConnectorSettings(lease_seconds=0.1, lease_margin=0.05, handshake_timeout=0.01),
        ConnectorSettings(mode="push"),
    ],
)
def test_no_setting_keeps_it_from_its_end(settings: ConnectorSettings) -> None:
    assert rehearse(settings, groups_of(cache_config(10, (full(16), ("layer0",))))).block_ids


def test_an_engine_starts_whatever_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a new kind of block")

    monkeypatch.setattr(rehearsal, "load_order", broken)
    try_rehearsal(ConnectorSettings(), groups_of(cache_config(10, (full(16), ("layer0",)))))
    assert "a new kind of block" in caplog.text


def test_what_a_request_sends_is_encoded_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[type] = []

    def noted(message: Any, correlation: int = 0) -> bytes:
        sent.append(type(message))
        return encode(message, correlation)

    monkeypatch.setattr(rehearsal, "encode", noted)
    rehearse(ConnectorSettings(), groups_of(cache_config(10, (full(16), ("layer0",)))))
    assert [sent.count(kind) for kind in (LeaseClaim, LeaseRelease)] == [TIMES, TIMES]
