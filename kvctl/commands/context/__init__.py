"""`kvctl context`: what its commands have in common."""

from __future__ import annotations

import typer

SECTION = "Set up"
EXAMPLES = (
    "kvctl context list",
    "kvctl context use prod",
)


def context(context: typer.Context) -> None:
    """Fleets by name: the hosts that --fleet asks, and the keys to ask them with.

    They stand in ~/.config/kvctl/contexts.yaml, as contexts: {NAME: {keys: DIRECTORY, hosts: [HOST:PORT]}}. DIRECTORY
    has host.keys and trusted.keys. Without a context the keys and peers of this host's kvd are taken.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
