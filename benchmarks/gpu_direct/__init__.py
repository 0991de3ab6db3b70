"""Direct reads between GPUs, without vLLM."""
