"""The backend `direct`: reads the memory of a worker on the same host itself."""
