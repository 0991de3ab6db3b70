"""`kvctl replay`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.option_kinds import number
from kvctl.cli.parsing import number_or_zero, share
from kvctl.cli.report_file import ReportOption
from kvctl.cli.settings import Settings
from kvctl.engines.pair_options import (
    KeyFileOption,
    NoVerifyOption,
    ToOption,
    most_memory,
    which_backends,
)
from kvctl.errors import UsageError

SECTION = "Measure"
EXAMPLES = (
    "kvctl replay incident.trace.zst --report replay.html",
    "kvctl replay monday --backend nixl,direct --no-coalesce",
)


def times(text: str) -> float:
    """An option's parser for how many times as fast."""
    value = number_or_zero(text.removesuffix("x"))
    if not 0 < value < 1e9:
        raise ValueError(f"{text!r} is no speed; write 1, 10 or 0.5")
    return value


def replay(  # noqa: PLR0913 - one for each option
    settings: Settings,
    *,
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A file, - for stdin, or an imported trace's name.")
    ],
    backends: Annotated[str | None, which_backends("the recorded one")] = None,
    no_coalesce: Annotated[
        bool, typer.Option("--no-coalesce", help="Also each without joining neighbouring blocks.")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Also each with this variable; may be repeated."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option("--speed", metavar="X", parser=times, help="X times as fast as recorded. [1]"),
    ] = None,
    concurrency: Annotated[
        int | None,
        number("--concurrency", help="As fast as possible, N at a time."),
    ] = None,
    limit: Annotated[int, number("--limit", "-n", help="The first N transfers. [1000]")] = 1000,
    scale: Annotated[
        float,
        typer.Option("--scale", metavar="SHARE", parser=share, help="Only this share of each prompt. [1]"),
    ] = 1.0,
    memory: Annotated[int, most_memory("2GiB")] = 2 << 30,
    no_verify: NoVerifyOption = False,
    to: ToOption = None,
    key_file: KeyFileOption = None,
    report: ReportOption = None,
) -> None:
    """Recorded transfers moved again, beside their record and in other ways.

    Two processes take memory of the recorded geometry, for the blocks that the trace names, and move the same blocks
    at the same times; both run here, or one on the host of --to. Every byte that lands is compared. Each --backend,
    --no-coalesce and --env adds a way; the stages of all stand side by side, with where the time goes and which is
    fastest. Exit code 1 when a byte is wrong.
    """
    if speed is not None and concurrency is not None:
        raise UsageError(
            f"--speed {speed:g} keeps the recorded times and --concurrency {concurrency} does not; give one of them"
        )
    from kvctl.bench.remote import target
    from kvctl.bench.replay import ReplayPace
    from kvctl.bench.replay_run import ReplayOptions, run

    run(
        ReplayOptions(
            trace=trace,
            backends=tuple(backends or ()),
            no_coalesce=no_coalesce,
            environment=tuple(map(_variable, env or ())),
            pace=ReplayPace(None if concurrency else speed or 1.0, concurrency or 0),
            limit=limit,
            scale=scale,
            memory=memory,
            verify=not no_verify,
            report=report,
            to=target(to, key_file),
        ),
        settings,
    )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {text}: no name and value; write --env UCX_TLS=tcp")
    return name, value
