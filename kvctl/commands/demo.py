"""`kvctl demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from kvctl.cli.option_kinds import choice
from kvctl.cli.settings import Settings
from kvctl.cli.units import Mode
from kvd.backends.registry import MEASURED

SECTION = "Try faults"
EXAMPLES = (
    "kvctl demo",
    "kvctl demo --simulate --loop  # no vLLM needed; look at it with kvctl top",
    "kvctl demo --mode push --backend direct",
)
MODES = get_args(Mode)
BACKENDS = (*MEASURED, "auto")


def demo(
    settings: Settings,
    *,
    mode: Annotated[
        str,
        choice(
            "--mode",
            MODES,
            help="Who moves the KV: the decoder after the prefill, or the prefiller layer by layer during it.",
        ),
    ] = "pull",
    backend: Annotated[
        str | None,
        choice(
            "--backend",
            BACKENDS,
            help="What moves the KV; direct needs no transfer engine. [default: nixl, or direct without NIXL]",
            show_default=False,
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Worker processes with made-up KV instead of vLLM: a few seconds."),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running after the summary, until Ctrl-C.")
    ] = False,
    loop: Annotated[
        bool,
        typer.Option("--loop", help="Keep sending requests after the summary, until Ctrl-C: for kvctl top."),
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            file_okay=False,
            help="Keep what a second demo can use again (the model) here; made if missing.",
        ),
    ] = None,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Leave logs, ledgers and the model behind.")
    ] = False,
) -> None:
    """Two small engines, a kvd between them, and a transfer.

    Starts two kvds as if on two hosts, a prefilling and a decoding vLLM engine with a tiny hybrid model, and a single
    engine to compare with; sends prompts through both and shows what moved. Everything runs on this machine's CPU, in a
    directory of its own, and is gone at the end.

    Exit code 1 when an output differs or KV did not come from the prefiller.
    """
    from kvctl.demo.run import run

    run(
        settings,
        mode=cast("Mode", mode),
        backend=backend,
        simulate=simulate,
        keep=keep,
        loop=loop,
        directory=directory,
        keep_files=keep_files,
    )
