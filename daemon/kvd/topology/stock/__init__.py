"""Pairs of engines of stock connectors: their own rules, and what to know of such a pair."""
