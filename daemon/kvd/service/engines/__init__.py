"""The engines of this host: who is registered, who lives, and who reads under which lease."""
