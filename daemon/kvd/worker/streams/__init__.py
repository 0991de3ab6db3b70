"""The device's stream: events on it, what waits for them, and loads that may not begin before one."""
