"""The scheduler's half of the connector: claims, leases, pushes, orders, and what it tells the workers in a step."""
