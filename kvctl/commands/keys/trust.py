"""`kvctl keys trust`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.keys.places import NOTHING_NEW, TAKEN, ListFile, key_files, kvd_follows, taken_note
from kvctl.keys.trusting import trust as add
from kvctl.views.output import show
from kvctl.views.setting_up.keys import TrustedHosts, trusted_hosts

SECTION = "Commands"
EXAMPLES = ("kvctl keys trust 'rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7' 10.0.0.8:7766",)


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
    path, before = key_files(settings, None, list_file).trusted, kvd_follows(settings)
    change = add(path, key, place, replace=replace)
    if revoked := change.revoked or before.revoked.get(key.strip(), ""):
        say(
            f"this key was revoked here: {revoked}; whoever has it is let in again. If it was stolen type kvctl keys"
            f" revoke '{key.strip()}', and have that host make a new pair"
        )
    for one in change.trusted:
        if change.added and one.key == change.added[0].key and one != change.added[0]:
            say(
                f"the same key is trusted for {one.place or 'no place'} as well; kvctl keys revoke takes all its lines"
            )
    kvd = taken_note(settings, path, before) if change.added or change.removed else NOTHING_NEW
    body = TrustedHosts(
        list_file=str(path),
        added=trusted_hosts(change.added),
        removed=trusted_hosts(change.removed),
        in_force=kvd == TAKEN,
        kvd=kvd,
        trusted=trusted_hosts(change.trusted),
    )
    show(body, settings)
