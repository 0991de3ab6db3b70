"""Sampled checksums of KV: the prefilling side adds up, the decoding side compares."""
