"""`kvctl completion`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvctl.cli.completion import SHELLS, script
from kvctl.cli.parsing import one_of
from kvctl.commands import engines, workers
from kvctl.commands.prefixes import cache
from kvctl.commands.running import agents, leases
from kvctl.explained.entries import codes
from kvctl.ledger.statistics import ORDERS
from kvctl.views.engines import engine_columns
from kvctl.views.picking import column_name
from kvctl.views.prefixes.cache import cache_columns
from kvctl.views.registry import views
from kvctl.views.running.agents import agent_columns
from kvctl.views.running.leases import lease_columns
from kvctl.views.screen import Column
from kvctl.views.transfers.document import transfer_columns
from kvctl.views.workers import worker_columns

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
    columns: dict[str, tuple[tuple[str, ...], list[Column[Any]]]] = {
        "engines": (tuple(engines.SORTS), engine_columns((), wide=True)),
        "workers": (tuple(workers.SORTS), worker_columns((), wide=True)),
        "leases": (tuple(leases.SORTS), lease_columns(wide=True)),
        "agents": (tuple(agents.SORTS), agent_columns(wide=True)),
        "cache": (tuple(cache.SORTS), cache_columns(wide=True)),
        "transfers": (tuple(ORDERS), transfer_columns((), wide=True)),
    }
    sorts = {
        f"{command} --sort": tuple(dict.fromkeys((*known, *map(column_name, found))))
        for command, (known, found) in columns.items()
    }
    return {"schema": tuple(views()), "explain": codes(), **sorts}
