"""The Error document: what stands on stderr when a command with JSON output fails."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvctl.errors import KvctlError
from kvctl.views.registry import View, wrapped
from kvd.shown import in_json


class Error(Struct, frozen=True, kw_only=True):
    """Why a command ended early."""

    code: Annotated[str, Meta(description="stable")]
    message: str
    hint: Annotated[str, Meta(description="what to do next; may be empty")]
    exit_code: int


def error_text(error: KvctlError) -> str:
    """The error as one line of JSON."""
    body = Error(code=error.code, message=error.message, hint=error.hint, exit_code=error.exit_code)
    return in_json(msgspec.json.encode(wrapped(body)).decode())


VIEWS = (View(Error),)
