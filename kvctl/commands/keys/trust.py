"""`kvctl keys trust`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.keys.places import ListFile, changes_seen, in_force, key_files
from kvctl.keys.trusting import trust as add
from kvctl.views.keys import TrustedHosts, trusted_hosts
from kvctl.views.output import show

SECTION = "Commands"


def trust(
    settings: Settings,
    *,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Public key of the other host.")],
    place: Annotated[
        str,
        typer.Argument(
            metavar="[HOST[:PORT]]", help="Where its kvd listens, as engines are told (peer.advertise)."
        ),
    ] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="That host has a new pair: its old key is revoked.")
    ] = False,
    list_file: ListFile = None,
) -> None:
    """Let another host in, by its public key.

    `kvctl keys show` on that host prints the two words. Without a place the key is let in, but speaks for no engine.
    """
    path, before = key_files(settings, None, list_file).trusted, changes_seen(settings)
    change = add(path, key, place, replace=replace)
    body = TrustedHosts(
        list_file=str(path),
        added=trusted_hosts(change.added),
        removed=trusted_hosts(change.removed),
        in_force=bool(change.added or change.removed) and in_force(settings, path, before),
        trusted=trusted_hosts(change.trusted),
    )
    show(body, settings)
