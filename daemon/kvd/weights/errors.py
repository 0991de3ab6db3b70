"""Why no fingerprint could be made."""

from __future__ import annotations

from kvd.errors import KvdError


class WeightsUnreadable(KvdError, ValueError):
    """Files that cannot be told apart by their contents; the message names the file and what is wrong with it."""
