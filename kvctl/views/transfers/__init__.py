"""The documents about recorded transfers."""
