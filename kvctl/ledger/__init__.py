"""Recorded transfers, of the running kvd or of a trace, and what they show."""
