"""How a check is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvctl.cli.settings import Settings
from kvctl.errors import KvctlError
from kvctl.views.doctor import About, Check, CheckState


def checked(
    about: About, state: CheckState, code: str, found: str, hint: str = "", reason: str = ""
) -> Check:
    """What was looked at; each part has the function with its own ``about``."""
    return Check(code=code, about=about, state=state, reason=reason, found=found, hint=hint)


def answered(checks: Callable[[Settings], Iterable[Check]], settings: Settings) -> Iterator[Check]:
    """Checks as far as kvd answers: a question that it refuses is a check, and all else is looked at all the same."""
    try:
        yield from checks(settings)
    except KvctlError as error:
        yield checked("transfers", "warning", "NOT_ANSWERED", error.message, error.hint)
