"""A demonstration with small, real engines on one machine."""
