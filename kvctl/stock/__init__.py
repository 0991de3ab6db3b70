"""What stock connectors of vLLM tell of themselves: questions, and decoders of answers. Needs no vLLM and no kvd."""
