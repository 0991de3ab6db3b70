"""KvdConnector: the KV connector that runs inside vLLM."""
