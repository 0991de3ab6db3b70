"""A fleet on one machine: real kvds and simulated engines up to what it bears, and a model beyond that."""
