"""Prefixes that engines share: what this one holds for others, and what others hold for it (docs/prefixes.md)."""
