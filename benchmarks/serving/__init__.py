"""Pairs of engines as they are deployed, under load; see `benchmarks.serving.__main__`."""
