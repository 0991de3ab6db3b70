"""What doctor says of one stock engine by itself: its build, and a model that was given for it and is not its own."""

from __future__ import annotations

import pytest

from kvctl.doctor import stock_checks as module
from kvctl.doctor.stock_checks import stock_checks
from kvd.geometry.model import EngineGeometry
from tests.kvctl.engines.test_stock import payload
from tests.support.samples import engine, gated_delta_net, llama
from tests.support.stock_listeners import nixl_listener

FULL = ("full", 16, None, llama(("layers.0",)))
STATE = ("mamba", 16, None, gated_delta_net(("layers.1",)))


@pytest.mark.parametrize(
    ("version", "groups", "codes"),
    [
        ("0.29.1", (FULL, STATE), ["FAIL_OPEN_BUILD"]),
        ("0.30.0", (FULL, STATE), []),
        ("0.29.1", (FULL,), []),
    ],
    ids=["several groups", "a later one", "one group"],
)
def test_a_build_that_answers_with_memory_that_nobody_wrote(
    version: str, groups: tuple[object, ...], codes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(*_: object) -> EngineGeometry:
        return engine("p", *groups, vllm_version=version)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "stock_engine", known)
    with nixl_listener({(0, 0): payload()}) as one:
        at = f"nixl://127.0.0.1:{one.port}"
        found = {check.code for check in stock_checks(at, at, 2)}
    assert found & {"FAIL_OPEN_BUILD"} == set(codes)


def test_a_model_that_was_given_and_is_not_the_engines() -> None:
    with nixl_listener({(0, 0): payload()}) as one:
        at = f"nixl://127.0.0.1:{one.port}:model=qwen3-32b,tp=8,name=Qwen/Qwen3-32B"
        found = {check.code: check for check in stock_checks(at, at, 2)}
    assert found["STOCK_MODEL"].state == "failed"
    assert "tells 1048576 bytes" in found["STOCK_MODEL"].found
