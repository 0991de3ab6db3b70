"""Moves KV between two processes of this host and measures it: what `kvctl benchmark` and `kvctl replay` stand on."""
