"""`kvctl diff`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.settings import Settings
from kvctl.engines.sources import load
from kvctl.views.diff import diff_document
from kvctl.views.output import show
from kvd.topology.compat import compare
from kvd.topology.describe import summarize_engine
from kvd.topology.stock.rules import with_stock_rules

SECTION = "Compare engines"
EXAMPLES = (
    "kvctl diff decode-0 prefill-1",
    "kvctl diff qwen3-32b:tp=4 qwen3-32b:tp=4,cache_dtype=fp8",
    "kvctl diff decode-0.json decode-0  # what changed since export-geometry",
)


def diff(
    settings: Settings,
    *,
    local: Annotated[
        str, typer.Argument(metavar="A", help="An engine, a model with options, or a geometry file.")
    ],
    remote: Annotated[str, typer.Argument(metavar="B", help="The same; A reads from B.")],
) -> None:
    """Two engines compared factor by factor.

    Each is an engine that kvd knows, a model with its options (qwen3-32b:tp=4,layout=HND or path/config.json:tp=4), or
    a geometry file. nixl://HOST:5600 and mooncake://HOST:8998 are engines behind a stock connector of vLLM. Add
    :model=qwen3-32b,tp=4 to compare their pages too. Exit code 0 when nothing differs, 1 when something does, handled
    or not.
    """
    here, there = load((local, remote), settings)
    body = diff_document(
        summarize_engine(here), summarize_engine(there), with_stock_rules(compare(here, there), here, there)
    )
    show(body, settings)
    if not body.same:
        raise typer.Exit(1)
