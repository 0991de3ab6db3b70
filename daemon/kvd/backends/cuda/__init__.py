"""Bindings of the CUDA driver."""
