"""Whole loads between two processes, without vLLM, against a plain copy of the same bytes."""
