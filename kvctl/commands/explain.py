"""`kvctl explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.parsing import meant
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError
from kvctl.explained.entries import codes
from kvctl.views.first_aid.explain import codes_document, explanations_document
from kvctl.views.output import show

SECTION = "Look"
EXAMPLES = (
    "kvctl explain KVD-PEER-UNREACHABLE",
    "kvctl explain PEER_DOWN -o wide  # with the test that provokes it",
)


def explain(
    settings: Settings,
    *,
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="KVD-BUSY, PEER_DOWN ...; none: list all of them.")
    ] = None,
) -> None:
    """What is behind a code: cause, what to look at, what to do.

    Every error ends with its code, and doctor, slow, describe-topology and transfers show theirs. -o wide adds the test
    that brings the situation about. docs/codes.md has the same texts. Exit code 2 where there is no such code.
    """
    if code is None:
        show(codes_document(), settings)
        return
    known = codes()
    wanted = code.strip("[]").upper()
    if wanted not in known:
        near = meant(wanted, known)
        raise UsageError(
            f"there is no code {code!r}" + (f"; {near}" if near else ""),
            "kvctl explain lists all of them",
        )
    show(explanations_document(wanted), settings)
