"""`kvctl top`: what it asks, and the full screen."""
