"""The durable record of transfers."""
