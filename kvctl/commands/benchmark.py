"""`kvctl benchmark`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvctl.errors import UsageError
from kvctl.parsing import count, counts, size, some_of
from kvctl.settings import Settings
from kvctl.sources import load, planned

if TYPE_CHECKING:
    from kvd.geometry.model import EngineGeometry

BACKENDS = ("nixl", "mooncake", "direct")
OPERATIONS = ("read", "write")
QUICK_SECONDS = 24.0
"""For all rounds: processes have to start besides, and bytes to be compared."""
FRAGMENTATIONS = ("contiguous", "runs-of-4", "random")
RARER = ("freed",)


def benchmark(  # noqa: PLR0913 - one for each option
    settings: Settings,
    *,
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENGINE FROM]", help="ENGINE reads from FROM: ids, presets or files."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="A preset's name, or a path of a config.json."),
    ] = None,
    local: Annotated[
        str | None,
        typer.Option("--local", metavar="OPTIONS", help="The reading engine of --model: tp=4,block_size=64."),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option("--remote", metavar="OPTIONS", help="The engine of --model that is read from: tp=8."),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar=",".join(BACKENDS),
            parser=some_of(*BACKENDS),
            help="[default: all there are]",
        ),
    ] = None,
    operations: Annotated[
        str | None,
        typer.Option(
            "--operation", metavar="read,write", parser=some_of(*OPERATIONS), help="[default: both]"
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", metavar="N,N", parser=counts, help="Of a request. [512,2048,8192; quick: 512]"
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency", metavar="N,N", parser=counts, help="Requests at a time. [1,4; quick: 1]"
        ),
    ] = None,
    fragmentation: Annotated[
        str | None,
        typer.Option(
            "--fragmentation",
            metavar=",".join((*FRAGMENTATIONS, *RARER)),
            parser=some_of(*FRAGMENTATIONS, *RARER),
            help="How blocks lie. [default: the first three]",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", parser=count, help="[15; quick: 5]")
    ] = None,
    memory: Annotated[
        int, typer.Option("--memory", metavar="SIZE", parser=size, help="KV memory of both processes. [1GiB]")
    ] = 1 << 30,
    quick: Annotated[bool, typer.Option("--quick", help="One size and few rounds: under a minute.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the bytes that land.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Bars below the table.")] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", dir_okay=False, help="Write a page of HTML as well."),
    ] = None,
) -> None:
    """What this host's transfer engines can move of a model's KV.

    Two processes take memory of the model's shape, with as many blocks as --memory allows, and move requests between
    them as the connector does: each backend, reads and writes, sizes, blocks that lie together or apart. Beside each
    rate stands what the machine did at best in the same rounds, and the ratio to it. The first move of each case is
    compared byte by byte. Host memory only. Exit code 1 when a byte is wrong.
    """
    from kvctl.bench.run import Wanted, run

    run(
        Wanted(
            pair=_pair(engines or [], model, local, remote, settings),
            backends=tuple(backends or ()),
            operations=tuple(operations or OPERATIONS),
            tokens=_given_or(tokens, (512,) if quick else (512, 2048, 8192)),
            concurrency=_given_or(concurrency, (1,) if quick else (1, 4)),
            fragmentations=tuple(fragmentation or FRAGMENTATIONS),
            rounds=rounds or (5 if quick else 15),
            memory=memory,
            seconds=QUICK_SECONDS if quick else math.inf,
            verify=not no_verify,
            plot=plot,
            report=report,
        ),
        settings,
    )


def _given_or(given: object, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """What the option's parser made of the option, or else the default: typer takes no tuples as annotations."""
    return given if isinstance(given, tuple) else otherwise


def _pair(
    named: list[str], model: str | None, local: str | None, remote: str | None, settings: Settings
) -> tuple[EngineGeometry, EngineGeometry]:
    """The reading engine and the one it reads from. Raises `UsageError` for what does not go together."""
    if model is not None:
        if named:
            raise UsageError(f"--model {model} and {named[0]!r} are two ways to say it; give one of them")
        return planned(model, local or ""), planned(model, remote or "")
    if local is not None or remote is not None:
        raise UsageError("--local and --remote say how the model of --model is served; give --model as well")
    if len(named) != 2:
        raise UsageError(
            f"a pair has two engines, and {len(named)} are named",
            "name the reading one and the one it reads from, or give --model; kvctl engines lists those of kvd",
        )
    here, there = load(named, settings)
    return here, there
