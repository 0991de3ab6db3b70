"""`kvctl benchmark`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvctl.cli.option_kinds import choices, number
from kvctl.cli.parsing import chosen_devices, counts, cuda_devices
from kvctl.cli.report_file import ReportOption
from kvctl.cli.settings import Settings
from kvctl.engines import pair_options
from kvctl.engines.sources import load_pair, planned
from kvctl.errors import UsageError

if TYPE_CHECKING:
    from kvd.backends.contract import Operation
    from kvd.geometry.model import EngineGeometry

SECTION = "Measure"
EXAMPLES = (
    "kvctl benchmark --quick",
    "kvctl benchmark --model qwen3-32b --local tp=4 --report bench.html",
    "kvctl benchmark --to 10.0.0.2 --key-file /etc/kvd/peer.key",
)
OPERATIONS = ("read", "write")
QUICK_SECONDS = 15.0
"""For all moves but the first of each backend and direction; processes have to start besides."""
FRAGMENTATIONS = ("contiguous", "runs-of-4", "random")
RARER = ("freed",)
"""Side by side, last first, as vLLM hands out the blocks of a request that is over."""


def benchmark(  # noqa: PLR0913 - one for each option
    settings: Settings,
    *,
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENGINE FROM]", help="ENGINE reads from FROM: ids, presets or files."),
    ] = None,
    model: pair_options.ModelOption = None,
    local: pair_options.LocalOption = None,
    remote: pair_options.RemoteOption = None,
    backends: Annotated[str | None, pair_options.which_backends("all there are")] = None,
    operations: Annotated[str | None, choices("--operation", OPERATIONS, help="[default: both]")] = None,
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
        choices(
            "--fragmentation",
            (*FRAGMENTATIONS, *RARER),
            help="How blocks lie. [default: the first three]",
        ),
    ] = None,
    rounds: Annotated[int | None, number("--rounds", help="[15; quick: 5]")] = None,
    memory: Annotated[int, pair_options.most_memory("1GiB")] = 1 << 30,
    devices: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="cpu|cuda[:N][,cuda[:N]]",
            parser=cuda_devices,
            help="Where the memory is: the reader's, and the other's. [cpu]",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One size and few rounds: under a minute.")] = False,
    no_verify: pair_options.NoVerifyOption = False,
    handshake: Annotated[
        bool,
        typer.Option("--handshake", help="What engines must know of each other first, instead of bytes."),
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Bars below the table.")] = False,
    report: ReportOption = None,
    to: pair_options.ToOption = None,
    key_file: pair_options.KeyFileOption = None,
) -> None:
    """What this host's transfer engines can move of a model's KV.

    Two processes take memory of the model's shape, with as many blocks as --memory allows. They move requests between
    them as the connector does: each backend, reads and writes, sizes, blocks that lie together or apart. Both run here,
    or the one that is read from on the host of --to. Beside each rate stands what the machine did at best in the same
    rounds, and the ratio to it. The first move of each case is compared byte by byte. Exit code 1 when a byte is wrong.

    With --handshake: two kvds of its own and simulated workers, no bytes. All ranks of one engine ask for those of the
    other: cold, warm, for a replica and after a restart. Without a pair 1, 4, 8 and 16 ranks of a Llama-3.1-8B. Of the
    other options only --rounds and --quick count.
    """
    if handshake:
        from kvctl.bench import handshake_run

        named = bool(engines or model or local or remote)
        pairs = [_pair(engines or [], model, local, remote, settings)] if named else _llamas(quick)
        handshake_run.run(pairs, rounds or (2 if quick else 5), settings)
        return

    from kvctl.bench.remote import target
    from kvctl.bench.run import BenchmarkOptions, run

    run(
        BenchmarkOptions(
            pair=_pair(engines or [], model, local, remote, settings),
            backends=tuple(backends or ()),
            operations=cast("tuple[Operation, ...]", tuple(operations or OPERATIONS)),
            tokens=_given_or(tokens, (512,) if quick else (512, 2048, 8192)),
            concurrency=_given_or(concurrency, (1,) if quick else (1, 4)),
            fragmentations=tuple(fragmentation or FRAGMENTATIONS),
            rounds=rounds or (5 if quick else 15),
            memory=memory,
            seconds=QUICK_SECONDS if quick else math.inf,
            verify=not no_verify,
            plot=plot,
            report=report,
            devices=chosen_devices(devices),
            to=target(to, key_file),
        ),
        settings,
    )


def _llamas(quick: bool) -> list[tuple[EngineGeometry, EngineGeometry]]:
    engines = (planned("llama-3.1-8b", f"tp={ranks}") for ranks in ((1, 8) if quick else (1, 4, 8, 16)))
    return [(engine, engine) for engine in engines]


def _given_or(given: object, otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """What the option's parser made of the option, or else the default: typer takes no tuples as annotations."""
    return given if isinstance(given, tuple) else otherwise


def _pair(
    named: list[str], model: str | None, local: str | None, remote: str | None, settings: Settings
) -> tuple[EngineGeometry, EngineGeometry]:
    """The reading engine and the one it reads from. Raises `UsageError` for what does not go together."""
    pair = pair_options.planned_pair(named, model, local, remote)
    if pair is not None:
        return pair
    if len(named) != 2:
        raise UsageError(
            f"a pair has two engines, and {len(named)} are named",
            "name the reading one and the one it reads from, or give --model; kvctl engines lists those of kvd",
        )
    return load_pair(named, settings)
