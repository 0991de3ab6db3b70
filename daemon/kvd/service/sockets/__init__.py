"""The daemon's sockets: bound, guarded by keys, counted, and read by one loop."""
