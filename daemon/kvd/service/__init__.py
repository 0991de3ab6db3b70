"""The daemon: registry, handshakes, leases, ledger, orders and metrics."""
