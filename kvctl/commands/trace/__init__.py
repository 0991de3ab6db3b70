"""`kvctl trace`: what its commands have in common."""

from __future__ import annotations

import typer

SECTION = "Look"
EXAMPLES = (
    "kvctl trace export incident.trace.zst --since 1h",
    "kvctl trace show incident.trace.zst",
)


def trace(context: typer.Context) -> None:
    """Recorded transfers as a file, enough to replay them elsewhere.

    A trace holds the geometry of the engines, and of each transfer its blocks and times: no tokens, no prompts, and no
    address of a host or of memory.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
