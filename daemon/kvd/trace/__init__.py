"""Traces: recorded transfers with the geometry of their engines, as a file that can be replayed elsewhere."""
