"""What this machine's processor can do, where vLLM's CPU build does otherwise for it."""

from __future__ import annotations

from pathlib import Path

_FLAGS = frozenset(
    word
    for line in Path("/proc/cpuinfo").read_text().splitlines()
    if line.startswith("flags")
    for word in line.split()
)
FLOAT32_STATES = "avx512_bf16" in _FLAGS
"""Whether vLLM keeps recurrent states in float32 whatever the model's type: it does so on CPUs that multiply bfloat16
by AVX-512 (``check_and_update_config`` of its CPU platform)."""
AMX = "amx_tile" in _FLAGS
"""Whether vLLM computes attention in bfloat16 by AMX, which packs blocks in tiles, and refuses latents in float32."""
