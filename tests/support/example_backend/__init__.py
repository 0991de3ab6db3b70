"""A backend as somebody adds it: this folder, and one line of the registry."""
