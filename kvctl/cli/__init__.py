"""What a command line is made of: options, settings, parsing, numbers for people, completion."""
