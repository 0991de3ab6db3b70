"""`kvctl keys revoke`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.keys.places import TAKEN, ListFile, key_files, kvd_follows, taken_note
from kvctl.keys.trusting import revoke as remove
from kvctl.views.output import show
from kvctl.views.setting_up.keys import TrustedHosts, trusted_hosts

SECTION = "Commands"
EXAMPLES = (
    "kvctl keys revoke 10.0.0.8:7766",
    "kvctl keys revoke 10.0.0.8  # all keys of that host",
)


def revoke(
    settings: Settings,
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="KEY|HOST[:PORT]",
            help="The key, or the host that has it; without a port all of that host.",
        ),
    ],
    list_file: ListFile = None,
) -> None:
    """Let a host in no more: its links and connections end within a second.

    Its engines are taken back from engines here. Type it on every host that trusted the key. Every line that has such a
    key goes.
    """
    path, before = key_files(settings, None, list_file).trusted, kvd_follows(settings)
    change = remove(path, what)
    kvd = taken_note(settings, path, before)
    body = TrustedHosts(
        list_file=str(path),
        added=(),
        removed=trusted_hosts(change.removed),
        in_force=kvd == TAKEN,
        kvd=kvd,
        trusted=trusted_hosts(change.trusted),
    )
    show(body, settings)
