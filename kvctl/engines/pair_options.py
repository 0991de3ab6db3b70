"""Options of commands that are about a pair of engines, and of those that move KV between two processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import OptionInfo

from kvctl.cli.option_kinds import choices, memory_size
from kvctl.engines.sources import planned, tell_block_size
from kvctl.errors import UsageError
from kvd.backends.registry import MEASURED

if TYPE_CHECKING:
    from kvd.geometry.model import EngineGeometry

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="A preset's name, or a path of a config.json."),
]
LocalOption = Annotated[
    str | None,
    typer.Option("--local", metavar="OPTIONS", help="The reading engine of --model: tp=4,block_size=64."),
]
RemoteOption = Annotated[
    str | None,
    typer.Option("--remote", metavar="OPTIONS", help="The engine of --model that is read from: tp=8."),
]
NoVerifyOption = Annotated[bool, typer.Option("--no-verify", help="Do not compare the bytes that land.")]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="HOST[:PORT]",
        help="The other side's memory is on that host, where `kvctl serve` runs. [default: both here]",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", metavar="FILE", help="The pair of keys of both sides (kvd --new-keys FILE)."),
]


def which_backends(unnamed: str) -> OptionInfo:
    """The option for the transfer engines to try; ``unnamed`` are those without it."""
    return choices("--backend", MEASURED, help=f"Which to try. [{unnamed}]")


def most_memory(default: str) -> OptionInfo:
    """The option for how much memory is taken."""
    return memory_size("--memory", help=f"Most KV memory of both processes. [{default}]")


def planned_pair(
    named: list[str], model: str | None, local: str | None, remote: str | None
) -> tuple[EngineGeometry, EngineGeometry] | None:
    """The reading engine of ``--model`` and the one it reads from; None without ``--model``.

    Raises `UsageError` for what does not go together, and what `planned` raises.
    """
    if model is not None:
        if named:
            raise UsageError(f"--model {model} and {named[0]!r} are two ways to say it; give one of them")
        pair = planned(model, local or ""), planned(model, remote or "")
        for engine in pair:
            tell_block_size(engine)
        return pair
    if local is not None or remote is not None:
        raise UsageError(
            "--local and --remote say how the model of --model is served; --model is missing",
            "give --model as well",
        )
    return None
