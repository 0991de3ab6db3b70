"""Documents about prefixes that engines hold for each other."""
