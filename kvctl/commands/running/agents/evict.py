"""`kvctl agents evict`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.errors import CheckFailed, UsageError
from kvctl.views.output import show
from kvctl.views.running.agents import eviction_document
from kvd.wire.agent import Evicted, EvictPeer

SECTION = "Commands"
EXAMPLES = ("kvctl agents evict ENGINE@GENERATION --yes",)


def evict(
    settings: Settings,
    *,
    peer: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE[@GENERATION]", help="The peer, as kvctl agents -o name has it; of any generation."
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also where loads are under way: they are misses then.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")] = False,
) -> None:
    """Have the workers of this host close what they hold of a peer engine.

    That unmaps its memory, so a dead one's is free. A peer that lives loses nothing: the next load connects anew. Does
    that with --yes. Refused with exit code 5 while loads from it are under way, unless --force makes them misses; 6 for
    users who may not. Exit code 1 where nobody holds anything of it, or where a lane still stands.
    """
    engine_id, at, generation = peer.rpartition("@") if "@" in peer else (peer, "", "")
    if not engine_id or (at and not generation):
        raise UsageError(f"{peer!r} is not ENGINE or ENGINE@GENERATION", "kvctl agents -o name lists them")
    order = EvictPeer(engine_id=engine_id, generation=generation, force=force, carry_out=yes)
    body = eviction_document(daemon.ask(settings, order, Evicted))
    show(body, settings)
    if not yes:
        say("nothing was done; add --yes to do it")
        return
    left = sum(one.left for one in body.evicted)
    mute = sum(bool(one.trouble) and not one.peer for one in body.evicted)
    if left or mute:
        told = f"{left} lanes still stand" if left else f"{mute} workers did not tell what they hold"
        raise CheckFailed(
            f"{told}; the table says why",
            "a lane that loads took up meanwhile is closed with --force, one that is stuck with the end of its engine",
        )
