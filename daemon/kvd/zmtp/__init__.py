"""ZMTP 3.1, ZeroMQ's protocol, without I/O: bytes in, events and bytes out. Stands on nothing of kvd."""
