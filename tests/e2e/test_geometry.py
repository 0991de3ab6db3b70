"""What a model's config.json says of the KV cache is what a running engine registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from kvctl.demo.deployment import transfer_config
from kvctl.demo.engine_spec import EngineSpec
from kvd.client.cards import engine_geometry
from kvd.geometry.config import CacheOptions, Parallel
from kvd.geometry.model import EngineGeometry, WorkerGeometry
from kvd.wire.query import EngineList, ListEngines
from tests.support import nursery
from tests.support.deployments import found_out
from tests.support.engine_calls import running_engine
from tests.support.processor import AMX, FLOAT32_STATES
from tests.support.samples import engine_from_config
from tests.support.started_kvd import start_kvd
from tests.support.tiny_models import MODELS, NO_PREFIX_CACHING, write_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ALWAYS = ("deepseek-v2", "qwen3.5-gdn")
"""The families of every run; `make e2e-matrix` has them all."""


LATENT_BLOCK = 128 if AMX else 16
"""vLLM's own choice on a CPU."""


def type_of(model: str) -> str:
    """What an engine of ``model`` computes in: vLLM's kernel for latents on AMX takes bfloat16 alone."""
    return "bfloat16" if AMX and model == "deepseek-v2" else MODELS[model].dtype


def running_geometry(model: str, path: Path, folder: Path) -> EngineGeometry:
    """The geometry that a real engine of ``model`` registers with a kvd."""
    kvd = start_kvd("host", folder / "h")
    try:
        spec = EngineSpec(
            model=path,
            work_dir=folder / "engine",
            log_path=folder / "engine.log",
            dtype=type_of(model),
            max_model_len=2048,
            enable_prefix_caching=model not in NO_PREFIX_CACHING,
            cache_dir=found_out(folder),
            kv_transfer_config=transfer_config(kvd, "the-engine", "kv_both"),
        )
        with running_engine(spec, nursery.start) as engine:
            engine.wait_ready()
            (row,) = cast("EngineList", kvd.ask(ListEngines(cards=True))).rows
            assert row.card is not None
            return engine_geometry(row.card)
    finally:
        kvd.stop()


def comparable(worker: WorkerGeometry) -> list[tuple[object, ...]]:
    """All of a worker but where its memory happens to stand."""
    return [
        (g.kind, g.block_size, g.window, g.scratch_blocks, [(x.name, x.page, x.stride) for x in g.layers])
        for g in worker.groups
    ]


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m in ALWAYS else pytest.mark.matrix) for m in MODELS]
)
def test_configuration_and_running_engine_agree(model: str, tmp_path: Path) -> None:
    path = write_model(model, tmp_path / "models")
    live = running_geometry(model, path, tmp_path)
    options = CacheOptions(
        block_size=LATENT_BLOCK if live.workers[0].groups[0].kind == "mla" else 128,
        kernel_block=32,
        layout="LBHNC",
        dtype=type_of(model),
        num_blocks=live.workers[0].num_blocks,
        max_tokens=2048,
        state_dtype="float32" if FLOAT32_STATES else None,
        align=model not in NO_PREFIX_CACHING,
        packing="amx" if AMX and type_of(model) == "bfloat16" else "vec",
    )
    config = json.loads((path / "config.json").read_text())
    derived = engine_from_config(config, Parallel(), options, engine_id="the-engine")

    assert [comparable(w) for w in derived.workers] == [comparable(w) for w in live.workers]
