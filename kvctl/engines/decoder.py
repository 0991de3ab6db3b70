"""The decoding engine that a command acts on."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.errors import UsageError

DecoderOption = Annotated[
    str,
    typer.Option(
        "--engine", "-e", metavar="ENGINE", help="The decoding engine; needed where kvd has several."
    ),
]


def only_decoder(settings: Settings) -> str:
    """The decoding engine that is meant where none is named. Raises `UsageError` unless kvd has just one."""
    rows = daemon.engines(settings)
    here = [r.engine.engine_id for r in rows if r.local and r.scheduler and r.engine.role != "prefill"]
    if len(here) != 1:
        if not here:
            raise UsageError(
                "kvd has no decoding engine of this host", "start one; `kvctl engines` lists all"
            )
        said = f"{len(here)} decoding engines: {', '.join(here)}"
        raise UsageError(f"kvd has {said}", "give one with --engine; `kvctl engines` lists all")
    return here[0]
