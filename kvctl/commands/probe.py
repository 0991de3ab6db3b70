"""`kvctl probe`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvctl.cli.option_kinds import number
from kvctl.cli.settings import Settings
from kvctl.engines.probing import probed
from kvctl.engines.stock import stock_address
from kvctl.errors import UsageError
from kvctl.views.output import show
from kvctl.views.probe import probe_document

SECTION = "Compare engines"
EXAMPLES = (
    "kvctl probe nixl://prefill-0:5600 --count 1000",
    "kvctl probe mooncake://prefill-0:8998",
)


def probe(
    settings: Settings,
    *,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="nixl://HOST:5600 or mooncake://HOST:8998.")
    ],
    count: Annotated[int, number("--count", help="How many questions, one after the other. [10]")] = 10,
) -> None:
    """Whether a stock connector of vLLM answers handshakes, and how fast.

    Asks as a decoder would, for rank 0 alone: a question that is not well-formed ends such a listener for good. Stops
    at the first question that gets no answer. Exit code 0 when all were answered alike, 1 when the engine became
    another one meanwhile, 4 when one was not answered.
    """
    stock = stock_address(address)
    if stock is None:
        raise UsageError(
            f"{address!r} is no address of a stock connector",
            "write nixl://HOST:5600 or mooncake://HOST:8998",
        )
    body = probe_document(stock.text, count, probed(stock, count, settings.timeout))
    show(body, settings)
    if body.code:
        raise typer.Exit(4)
    if body.engines > 1:
        raise typer.Exit(1)
