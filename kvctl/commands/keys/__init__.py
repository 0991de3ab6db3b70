"""`kvctl keys`: what its commands have in common."""

from __future__ import annotations

import typer

SECTION = "Set up"
EXAMPLES = (
    "kvctl keys generate",
    "kvctl keys show  # what others are to type",
    "kvctl keys revoke 10.0.0.8:7766",
)


def keys(context: typer.Context) -> None:
    """The key of this host, and the keys of the hosts that it trusts.

    A host is known to others by its public key. kvd follows the list of trusted keys while it runs. A host that is
    trusted comes in. A host that is revoked is out within a second.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
