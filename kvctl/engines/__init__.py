"""Engines to compare and move between: of the running kvd, of a model with options, of a file."""
