"""The wire: message structs, framing, versions. It opens no socket and no file."""
