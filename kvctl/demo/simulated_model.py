"""The model of the simulated engines: the demo's own (`kvctl.demo.kinds`) with twice the layers.

Three of four layers keep a Gated DeltaNet state, the fourth has full attention. The layers at one place in the period
make a group, and all groups share the same memory.
"""

from __future__ import annotations

from kvctl.demo.kinds import TINY
from kvd.geometry.config import CacheOptions, Parallel, engine_from_shape
from kvd.geometry.families import model_shape
from kvd.geometry.model import EngineGeometry

MODEL = "simulated/qwen3.5-gdn"
PERIOD = 4
BLOCK_TOKENS = 640
"""What vLLM takes on a CPU, in steps of 128: an attention page is no smaller than a state."""
_CONFIG = TINY.config | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
    "num_hidden_layers": 2 * PERIOD,
    "layer_types": 2 * TINY.config["layer_types"],
}


def simulated_geometry(engine_id: str, ranks: int, blocks: int, stages: int = 1) -> EngineGeometry:
    """An engine of 1 or 2 workers a stage with room for so many blocks each; its addresses are made up."""
    options = CacheOptions(num_blocks=blocks, kernel_block=128, layout="LBHNC", align=True)
    parallel = Parallel(tp=ranks, pp=stages)
    return engine_from_shape(model_shape(_CONFIG, MODEL), parallel, options, engine_id=engine_id)
