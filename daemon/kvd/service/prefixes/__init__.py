"""Hints: what this kvd knows of the prefixes that engines hold, its own and those of other kvds (docs/prefixes.md)."""
