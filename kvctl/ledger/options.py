"""The options that choose transfers, shared by the commands that look at them, and the question that they make."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.models import OptionInfo

from kvctl.cli.option_kinds import choice, duration, number
from kvctl.cli.parsing import one_of
from kvd.wire.miss import MISS_MEANINGS
from kvd.wire.transfer import ListTransfers

STATES = ("done", "miss")
CHECKSUMS = ("ok", "differs", "unknown")

EngineOption = Annotated[
    str, typer.Option("--engine", "-e", metavar="ENGINE", help="Only to or from this engine.")
]
PeerOption = Annotated[
    str,
    typer.Option(
        "--peer", "-p", metavar="ENGINE", help="Only from this engine; with --engine, between both."
    ),
]
RequestOption = Annotated[str, typer.Option("--request", "-r", metavar="ID", help="Only of this request.")]
StateOption = Annotated[str | None, choice("--state", STATES, help="Only done, or misses.")]
CodeOption = Annotated[
    str | None,
    typer.Option(
        "--code",
        metavar="CODE",
        parser=one_of(*MISS_MEANINGS),
        help="Only misses of this code (docs/transfers.md).",
    ),
]
ChecksumOption = Annotated[
    str | None, choice("--checksum", CHECKSUMS, help="Only those whose checksums were compared so.")
]
BackendOption = Annotated[str, typer.Option("--backend", metavar="NAME", help="Only moved by this backend.")]
SinceOption = Annotated[float | None, duration("--since", help="Only of the last 10m, 2h, 1d; 10 is 10s.")]
SlowerThanOption = Annotated[float | None, duration("--slower-than", help="Only those that took longer.")]
FromOption = Annotated[
    str,
    typer.Option(
        "--from", metavar="TRACE", help="From a trace, by file or imported name, instead of from kvd."
    ),
]


def last_option(help_: str) -> OptionInfo:
    """``--last N``, with its own words."""
    return number("--last", "--limit", "-n", help=help_)


def question(
    *,
    engine: str = "",
    peer: str = "",
    request: str = "",
    state: str | None = None,
    code: str | None = None,
    backend: str = "",
    since: float | None = None,
    slower_than: float | None = None,
) -> ListTransfers:
    """What to ask the ledger for."""
    return ListTransfers(
        engine_id=engine,
        peer=peer,
        request_id=request,
        state=state or "",
        code=code or "",
        backend=backend,
        within=since or 0.0,
        slower_than=slower_than or 0.0,
    )
