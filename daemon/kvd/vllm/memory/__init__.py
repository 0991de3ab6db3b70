"""vLLM's KV memory as the floors below see it: groups, tensors, the pool, streams."""
