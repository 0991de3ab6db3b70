"""What differs between builds of vLLM, and what this engine's build and weights are."""
