"""Which prompt a prefill was of: its digest, and the seal of what a decoder is told."""
