"""What runs in any worker process, without vLLM and torch: a session with kvd, peers, pull, push and checksums."""
