"""The operator's command line for KV cache transfer between vLLM engines."""
