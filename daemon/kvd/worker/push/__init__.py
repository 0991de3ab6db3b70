"""Layer-wise push: both sides of it, from the announced window to the last layer written."""
