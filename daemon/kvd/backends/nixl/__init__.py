"""The backend `nixl`: NIXL's agents."""
