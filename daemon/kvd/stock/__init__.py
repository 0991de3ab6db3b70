"""Read-only clients of the handshakes that stock vLLM connectors speak."""
