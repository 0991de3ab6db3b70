"""Where geometries come from: models with options, files, engines; and how a wrong one is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvctl.engines.models import INSTALLED, preset_names
from kvctl.engines.options import option_names, parse_engine_options
from kvctl.engines.sources import EngineId, source
from kvd.geometry.config import CacheOptions, Parallel
from kvd.geometry.model import EngineGeometry

if TYPE_CHECKING:
    from tests.kvctl.conftest import FakeDaemon, Run

PRESETS = Path(__file__).parents[3] / "configs" / "models"
ISSUE = ("describe-topology", "--model", "qwen3-next-80b-a3b", "--local", "tp=4", "--remote", "tp=8")


def geometry(text: str) -> EngineGeometry:
    found = source(text)
    assert isinstance(found, EngineGeometry)
    return found


def test_every_preset_of_the_repository_is_known_by_its_name() -> None:
    assert preset_names() == tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))
    for name in preset_names():
        assert geometry(name).model == name


def test_a_wheel_carries_the_presets_to_where_they_are_looked_for() -> None:
    project = tomllib.loads((PRESETS.parents[1] / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["configs/models"] == f"kvctl/{INSTALLED.name}"
    assert INSTALLED.parent.name == "kvctl"


def test_a_model_with_options_is_an_engine_that_need_not_run() -> None:
    engine = geometry("qwen3-32b:tp=4,pp=2,block-size=64")
    assert (engine.tp, engine.pp, len(engine.workers)) == (4, 2, 8)
    assert engine.workers[0].groups[0].block_size == 64
    assert engine.engine_id == "qwen3-32b:tp=4,pp=2,block-size=64"


def test_the_name_that_a_hub_gives_a_model_means_its_preset() -> None:
    assert geometry("Qwen/Qwen3-32B:tp=2").model == "qwen3-32b"


def test_every_option_of_an_engine_can_be_typed() -> None:
    examples = {
        "partition": "3+5",
        "layout": "hnd",
        "cache_dtype": "fp8",
        "dtype": "float16",
        "state_dtype": "float32",
        "packing": "vec",
        "align": "true",
        "channels_first": "yes",
        "one_group": "1",
    }
    text = ",".join(f"{name}={examples.get(name, '2')}" for name in option_names())
    options = parse_engine_options(text)
    assert options.parallel == Parallel(tp=2, pp=2, dcp=2, interleave=2, partition=(3, 5))
    untouched = CacheOptions()
    for field in dataclasses.fields(CacheOptions):
        assert getattr(options.cache, field.name) != getattr(untouched, field.name), field.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpp=4", "no engine option 'tpp'; did you mean tp"),
        ("tp", "tp has no value"),
        ("tp=four", "tp: 'four' is not a whole number above zero"),
        ("tp=0", "tp: '0' is not a whole number above zero"),
        ("tp=2,tp=4", "tp is given twice, the second time as '4'"),
        ("layout=HDN", "layout: 'HDN' is not one of NHD, HND"),
        ("dtype=bfloat", "did you mean bfloat16"),
        ("align=maybe", "align: 'maybe' is neither true nor false"),
    ],
)
def test_a_wrong_option_is_2_and_named(run: Run, text: str, said: str) -> None:
    outcome = run("describe-topology", "--model", "qwen3-32b", "--local", text)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


def test_an_unknown_model_is_2_with_near_misses(run: Run) -> None:
    outcome = run("describe-topology", "--model", "lama-3.1-70b")
    assert outcome.code == 2
    assert "no model 'lama-3.1-70b'; did you mean llama-3.1-70b" in outcome.err
    nothing_near = run("describe-topology", "--model", "nothing").err
    assert "no model 'nothing'; presets are deepseek-v3," in nothing_near
    assert nothing_near.count("deepseek-v3") == 1


def test_sizes_that_cannot_be_split_are_1_and_named_with_both_numbers(run: Run) -> None:
    outcome = run("describe-topology", "--model", "qwen3-32b", "--local", "tp=3", "--remote", "tp=4")
    assert (outcome.code, outcome.out) == (1, "")
    assert "qwen3-32b:tp=3: 8 KV heads cannot be split over 3 ranks" in outcome.err


def test_engines_that_do_not_fit_are_1_with_the_table_of_factors(run: Run) -> None:
    outcome = run(
        "describe-topology", "--model", "qwen3-32b", "--local", "tp=4", "--remote", "cache_dtype=fp8"
    )
    assert outcome.code == 1
    assert "NOT compatible" in outcome.out
    assert re.search(r"^cache_dtype +auto +fp8 +NO ", outcome.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--local", "tp=4"), "give --model as well"),
        (("--model", "qwen3-32b", "decode-0"), "two ways to say it"),
        (("qwen3-32b",), "takes a second one to read from"),
        (("a", "b", "c"), "'c' is a third"),
        (("missing.yaml", "qwen3-32b"), "cannot read missing.yaml: No such file"),
        (
            ("--model", "qwen3-32b", "--bandwidth", "fast"),
            "'fast' is not a bandwidth above zero; write 50GB/s",
        ),
        (("--model", "qwen3-32b", "--tokens", "many"), "'many' is not a whole number above zero"),
    ],
)
def test_what_does_not_go_together_is_2(run: Run, arguments: tuple[str, ...], said: str) -> None:
    outcome = run("describe-topology", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


def test_a_config_json_is_a_model(run: Run, tmp_path: Path) -> None:
    config = yaml.safe_load((PRESETS / "qwen3-32b.yaml").read_text())["config"]
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in (folder / "config.json", folder):
        assert geometry(f"{name}:tp=4").model == "my-model"
    by_file, by_name = geometry(f"{folder}:tp=4"), geometry("qwen3-32b:tp=4")
    assert by_file.workers == by_name.workers
    outcome = run("describe-topology", "--model", folder, "--local", "tp=4", "--remote", "tp=8")
    assert outcome.code == 0
    assert f"{folder}:tp=4 (tp4, blocks of 16) reads from" in outcome.out


def test_a_config_that_is_not_understood_is_1_and_says_why(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    outcome = run("describe-topology", "--model", tmp_path)
    assert outcome.code == 1
    assert "num_hidden_layers" in outcome.err


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_an_exported_engine_is_the_same_engine(
    run: Run, daemon: FakeDaemon, tmp_path: Path, form: str
) -> None:
    exported = run("export-geometry", "decode-0", "-o", form, "--socket", daemon.directory)
    assert exported.code == 0
    file = tmp_path / f"decode.{form}"
    file.write_text(exported.out)
    same = run("diff", file, "decode-0", "-o", "json", "--socket", daemon.directory)
    assert (same.code, json.loads(same.out)["same"]) == (0, True)
    again = run("export-geometry", file, "-o", form)
    assert again.out == exported.out


def test_files_ask_no_kvd(run: Run, tmp_path: Path) -> None:
    for tp in (4, 8):
        out = run("export-geometry", f"llama-3.1-8b:tp={tp}").out
        (tmp_path / f"{tp}.json").write_text(out)
    outcome = run("describe-topology", tmp_path / "4.json", tmp_path / "8.json", "-o", "json")
    direct = run("describe-topology", "llama-3.1-8b:tp=4", "llama-3.1-8b:tp=8", "-o", "json")
    assert (outcome.code, outcome.out) == (0, direct.out)


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda _: "[]", 2, "holds a list, neither a geometry nor a model's configuration"),
        (lambda _: "{", 2, "is not JSON"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 9'), 2, "schema_version 9"),
        (lambda text: text.replace('"tp": 1', '"tp": "one"'), 2, "`$.tp`"),
        (lambda text: text.replace('"num_blocks": 1024', '"num_blocks": 4096'), 2, "of a region of"),
    ],
)
def test_a_spoilt_file_is_refused_with_its_name(
    run: Run, tmp_path: Path, spoil: Any, code: int, said: str
) -> None:
    file = tmp_path / "engine.json"
    file.write_text(spoil(run("export-geometry", "qwen3-32b").out))
    outcome = run("diff", file, "qwen3-32b")
    assert (outcome.code, outcome.out) == (code, "")
    assert str(file) in outcome.err
    assert said in outcome.err


def test_options_belong_to_models_not_to_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    file.write_text(run("export-geometry", "qwen3-32b").out)
    outcome = run("diff", f"{file}:tp=4", "qwen3-32b")
    assert outcome.code == 2
    assert "is a geometry file" in outcome.err


def test_any_other_name_is_an_engine_of_kvd(run: Run, tmp_path: Path) -> None:
    assert source("decode-0") == EngineId("decode-0")
    assert source("host:8000") == EngineId("host:8000")
    outcome = run("diff", "qwen3-32", "qwen3-32b", "--runtime-dir", tmp_path / "none")
    assert outcome.code == 3
    assert "'qwen3-32' is no preset (did you mean qwen3-32b" in outcome.err


def test_a_model_and_a_running_engine_can_be_compared(run: Run, daemon: FakeDaemon) -> None:
    outcome = run(
        "describe-topology", "decode-0", "qwen3-32b:tp=4", "-o", "json", "--socket", daemon.directory
    )
    [pair] = json.loads(outcome.out)["pairs"]
    assert (outcome.code, pair["compatible"]) == (1, False)
    assert (pair["local"]["engine_id"], pair["remote"]["engine_id"]) == ("decode-0", "qwen3-32b:tp=4")


def processor_seconds(*command: str) -> float:
    """The least of several, from exec to exit; a busy machine changes it little, unlike time by the clock."""
    least = float("inf")
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return least


def test_planning_a_hybrid_takes_less_than_half_a_second_of_a_core() -> None:
    """Or, on a machine where even the libraries take long, no more than a few times that."""
    libraries = processor_seconds("-c", "import numpy, typer")
    assert processor_seconds("-m", "kvctl", *ISSUE, "-o", "json") < max(0.5, 4 * libraries)


def test_a_configuration_is_called_by_its_file_or_where_that_is_config_json_by_its_folder(
    tmp_path: Path,
) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_size": 1024, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    for name in ("x.json", "config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    assert geometry(str(tmp_path / "x.json")).model == "x"
    assert geometry(str(tmp_path / "config.json")).model == tmp_path.name


def test_a_block_size_that_the_model_does_not_allow_is_said(run: Run) -> None:
    said = run("describe-topology", "--model", "qwen3-next-80b-a3b", "--local", "block_size=64").err
    assert re.search(r"blocks have \d+ tokens and not 64: vLLM makes a page", said)
    assert run("describe-topology", "--model", "qwen3-32b", "--local", "block_size=64").err == ""
    assert run("describe-topology", "--model", "qwen3-next-80b-a3b").err == ""
