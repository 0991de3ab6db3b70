"""Checksums of KV: what is added up, and what a decoding worker compares."""
