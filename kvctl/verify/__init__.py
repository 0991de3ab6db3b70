"""Answers of live engines held against each other."""
