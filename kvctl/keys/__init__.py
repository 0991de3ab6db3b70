"""The key of this host, and the keys of others that it trusts."""
