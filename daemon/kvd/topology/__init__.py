"""Who reads which bytes from whom."""
