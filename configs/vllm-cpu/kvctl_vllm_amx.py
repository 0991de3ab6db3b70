"""Asks the kernel for the AMX registers in every vLLM process.

torch requests the permission (one arch_prctl call per process) when its own warm-up runs. With eager mode and a KV
cache of fixed size vLLM skips the warm-up, and a worker whose very first step is the decode of one token would then
die with SIGILL on a processor that has AMX. vLLM calls the entry points of `vllm.general_plugins` in all of its
processes before any model code runs.
"""


def request_amx() -> None:
    """Request the permission; a processor without AMX answers False, which is fine."""
    import torch

    torch.cpu._init_amx()  # noqa: SLF001 - torch has no public name for it
