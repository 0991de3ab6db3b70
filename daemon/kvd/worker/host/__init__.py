"""What a worker's process is to its host: how late it is woken, and where it stands."""
