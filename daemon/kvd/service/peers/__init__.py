"""Other kvds: links, handshakes, compatibility of engines, and what is passed on."""
