"""Documents of what running engines hold of each other, and of taking them out of use."""
