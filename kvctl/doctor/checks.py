"""How a check is written down."""

from __future__ import annotations

from kvctl.views.doctor import About, Check, State


def checked(about: About, state: State, code: str, found: str, hint: str = "", reason: str = "") -> Check:
    """What was looked at; each part has the function with its own ``about``."""
    return Check(code=code, about=about, state=state, reason=reason, found=found, hint=hint)
