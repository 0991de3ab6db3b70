"""The Topology document, as a screen and as drawings."""
