"""The backend `auto`: `direct` where it can be, else the configured engine."""
