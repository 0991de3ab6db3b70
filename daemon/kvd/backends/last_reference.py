"""Objects of transfer engines whose destructor ends their transfers: they end with the last reference to them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from kvd.backends.errors import BackendError


def check_destroyed(gone: weakref.ref[Any], what: str, *, backend: str, hint: str) -> None:
    """Return once the object is destroyed.

    Raises:
        BackendError: something still refers to it, so it lives and its transfers may still write.
    """
    if gone() is not None:
        gc.collect()
    if gone() is not None:
        raise BackendError(
            f"{what} is still referred to and was not destroyed: its transfers may still write",
            backend=backend,
            hint=hint,
        )
