"""Pull: the decoding worker reads a request's KV when its prefill is done."""
