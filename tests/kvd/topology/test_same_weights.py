"""Whether two engines run one model: their weights decide where both tell them, else configuration and name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.geometry.model import EngineGeometry
from kvd.topology.compat import Factor, compare, compatible
from kvd.topology.describe import describe
from tests.support.samples import engine, llama

FULL = ("full", 16, None, llama(("layers.0",)))
ONE = {"weights": "w1-00112233445566aa", "config": "c1-00112233445566bb", "weights_source": "safetensors"}
OTHER = {**ONE, "weights": "w1-ffeeddccbbaa9988"}
GIVEN = {**ONE, "weights": "ours", "weights_source": "setting"}
UNTOLD = {"config": ONE["config"], "weights_source": "unknown: no file of weights is there"}


def pair(
    here: dict[str, str], there: dict[str, str], names: tuple[str, str] = ("llama", "llama")
) -> tuple[EngineGeometry, EngineGeometry]:
    local, remote = engine("d", FULL, **here), engine("p", FULL, **there)  # type: ignore[arg-type]
    return replace(local, model=names[0]), replace(remote, model=names[1])


def failing(factors: tuple[Factor, ...]) -> set[str]:
    return {factor.name for factor in factors if not factor.ok}


def factor(factors: tuple[Factor, ...], name: str) -> Factor:
    return next(f for f in factors if f.name == name)


def test_a_fine_tune_under_the_base_models_name_is_refused_with_both_values() -> None:
    factors = compare(*pair(ONE, OTHER))
    assert failing(factors) == {"weights"}
    found = factor(factors, "weights")
    assert (found.local, found.remote, found.fatal) == (ONE["weights"], OTHER["weights"], True)


def test_one_model_under_two_names_fits() -> None:
    factors = compare(*pair(ONE, ONE, ("chat", "/m/llama")))
    assert compatible(factors)
    assert not any(f.differs for f in factors)
    assert factor(factors, "model").note == "names do not decide, `weights` does"


def test_two_names_of_two_models_are_refused_for_their_weights() -> None:
    assert failing(compare(*pair(ONE, OTHER, ("a", "b")))) == {"weights"}


@pytest.mark.parametrize("facts", [UNTOLD, {}, {"weights_source": "off"}])
def test_names_count_where_one_side_does_not_tell_its_weights(facts: dict[str, str]) -> None:
    assert compatible(compare(*pair(ONE, facts)))
    assert compatible(compare(*pair(facts, facts)))
    assert failing(compare(*pair(ONE, facts, ("a", "b")))) == {"model"}
    assert failing(compare(*pair(facts, facts, ("a", "b")))) == {"model"}


def test_the_configuration_counts_also_where_weights_are_not_known() -> None:
    assert failing(compare(*pair(ONE, {**UNTOLD, "config": "c1-0000000000000000"}))) == {"config"}
    assert failing(compare(*pair(ONE, {**ONE, "config": "c1-0000000000000000"}))) == {"config"}


def test_one_id_on_both_sides_overrules_names_and_configurations() -> None:
    other = {**GIVEN, "config": "c1-0000000000000000"}
    assert compatible(compare(*pair(GIVEN, other, ("llama-fp8", "llama"))))
    assert failing(compare(*pair(GIVEN, {**GIVEN, "weights": "theirs"}))) == {"weights"}
    assert failing(compare(*pair(GIVEN, ONE))) == {"weights"}


def test_an_id_may_be_the_other_sides_fingerprint() -> None:
    assert compatible(
        compare(*pair({**ONE, "weights_source": "setting", "config": "c1-0000000000000000"}, ONE))
    )


def test_fingerprints_made_in_two_ways_leave_it_to_configuration_and_name() -> None:
    newer = {**ONE, "weights": "w2-00112233445566aa"}
    factors = compare(*pair(ONE, newer))
    assert compatible(factors)
    assert factor(factors, "weights").note == "made in two ways, which cannot be compared"
    assert failing(compare(*pair(ONE, newer, ("a", "b")))) == {"model"}
    assert compatible(compare(*pair(ONE, {**ONE, "config": "v1-00112233445566bb"})))


def test_precision_alone_is_told_and_fits() -> None:
    facts = ({**GIVEN, "quantization": "fp8"}, {**GIVEN, "quantization": "none"})
    found = factor(compare(*pair(*facts)), "quantization")
    assert (found.ok, found.differs) == (True, True)
    assert "precision" in found.note


def test_an_operator_is_told_what_to_do() -> None:
    (refused,) = [f for f in describe(*pair(ONE, OTHER)).findings if f.severity == "error"]
    assert refused.code == "COMPAT_MISMATCH"
    assert refused.message.startswith(f"weights: {ONE['weights']} here, {OTHER['weights']} there: ")
    assert 'set "weights" in kv_connector_extra_config of both to one id' in refused.hint


def test_weights_that_are_not_known_are_a_finding_of_live_engines_only() -> None:
    codes = [f.code for f in describe(*pair(UNTOLD, UNTOLD)).findings]
    assert codes.count("WEIGHTS_UNKNOWN") == 2
    for facts in (ONE, GIVEN, {"weights_source": "off"}, {}):
        assert "WEIGHTS_UNKNOWN" not in [f.code for f in describe(*pair(facts, facts)).findings]
