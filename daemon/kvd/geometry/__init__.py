"""What a worker's KV cache looks like, byte for byte."""
