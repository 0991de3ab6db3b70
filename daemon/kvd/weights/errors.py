"""Why no fingerprint could be made."""


class WeightsUnreadable(ValueError):
    """Files that cannot be told apart by their contents; the message names the file and what is wrong with it."""
