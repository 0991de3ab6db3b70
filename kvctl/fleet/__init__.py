"""Hosts other than this one: which there are, with which keys they are asked, and all of them side by side."""
