"""`kvctl completion`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvctl.cli.completion import SHELLS, script
from kvctl.cli.parsing import one_of


def completion(
    shell: Annotated[
        str, typer.Argument(metavar="|".join(SHELLS), parser=one_of(*SHELLS), help="The shell.")
    ],
) -> None:
    """A completion script for bash, zsh or fish.

    bash: source <(kvctl completion bash); zsh: kvctl completion zsh >DIR_OF_FPATH/_kvctl; fish: kvctl completion fish |
    source. Packages install the same scripts from completions/.
    """
    sys.stdout.write(script(shell))
