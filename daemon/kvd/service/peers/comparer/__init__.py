"""Comparing engines in processes that can be ended: the pool, a handle on each, and the process itself."""
