"""The backend `mooncake`: Mooncake's transfer engine."""
