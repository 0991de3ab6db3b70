"""`kvctl completion`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvctl.cli.completion import SHELLS, script
from kvctl.cli.parsing import one_of
from kvctl.explained.entries import codes
from kvctl.views.registry import views

if TYPE_CHECKING:
    from kvctl.cli.loading import LazyGroup

SECTION = "About kvctl"
EXAMPLES = (
    "source <(kvctl completion bash)",
    "kvctl completion fish | source",
)


def completion(
    context: typer.Context,
    shell: Annotated[
        str, typer.Argument(metavar="|".join(SHELLS), parser=one_of(*SHELLS), help="The shell.")
    ],
) -> None:
    """A completion script for bash, zsh or fish.

    bash: source <(kvctl completion bash); zsh: kvctl completion zsh >DIR_OF_FPATH/_kvctl; fish: kvctl completion fish |
    source. Packages install the same scripts from completions/.
    """
    group = cast("LazyGroup", context.find_root().command)
    sys.stdout.write(script(shell, group, words()))


def words() -> dict[str, tuple[str, ...]]:
    """What commands take that do not say so themselves."""
    return {"schema": tuple(views()), "explain": codes()}
