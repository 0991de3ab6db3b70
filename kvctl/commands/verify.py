"""`kvctl verify`."""

from __future__ import annotations

import sys
from typing import Annotated, cast

import typer

from kvctl.cli.option_kinds import choices, number
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.cli.units import filled
from kvctl.engines.decoder import DecoderOption, only_decoder
from kvctl.errors import CheckFailed, UsageError
from kvctl.verify.endpoint import base_url, served_model
from kvctl.verify.runs import Endpoints, is_wrong, prompt_of, verified
from kvctl.views.output import show
from kvctl.views.verification import Verification
from kvd.wire.order import When

SECTION = "Try faults"
EXAMPLES = (
    "kvctl verify --endpoint http://d:8000 --prefill http://p:8000",
    "kvctl verify --endpoint http://d:8000 --router http://r:8000 --yes",
)
MOMENTS = ("before", "flight", "layers")
ANSWER_SECONDS = 120.0
"""How long an answer may take where --timeout does not say."""


def verify(  # noqa: PLR0913 - each is an option
    settings: Settings,
    *,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL", help="OpenAI endpoint of the decoding engine.")
    ],
    prefill: Annotated[str, typer.Option("--prefill", metavar="URL", help="The same of its prefiller.")] = "",
    router: Annotated[
        str, typer.Option("--router", metavar="URL", help="Or a router in front of both, in either mode.")
    ] = "",
    engine: DecoderOption = "",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="[the first one served]")] = "",
    prompts: Annotated[int, number("--prompts", help="How many prompts. [3]")] = 3,
    tokens: Annotated[int, number("--prompt-tokens", help="Tokens of the longest. [512]")] = 512,
    answer: Annotated[int, number("--max-tokens", help="Tokens of an answer. [16]")] = 16,
    when: Annotated[
        str, choices("--when", MOMENTS, help="When the misses are forced. [all of them]")
    ] = ",".join(MOMENTS),
    yes: Annotated[
        bool, typer.Option("--yes", help="Force misses; without, only the two references are compared.")
    ] = False,
) -> None:
    """Answers of live engines with and without forced misses, compared token for token.

    Two references: with the prefiller's KV (reuse), and computed by the decoder alone (recompute). An answer whose load
    was made to miss must equal one of them. Exit code 0 when all do, 1 when one does not or was not loaded.
    """
    if bool(prefill) == bool(router):
        said = (
            "--prefill and --router are both given" if prefill else "neither --prefill nor --router is given"
        )
        raise UsageError(said, "give one of them: see kvctl verify --help")
    chosen = cast("tuple[When, ...]", when)
    timeout = settings.timeout if settings.timeout_given else ANSWER_SECONDS
    url = base_url(endpoint)
    place = Endpoints(
        endpoint=url,
        prefill=base_url(prefill) if prefill else "",
        router=base_url(router) if router else "",
        model=model or served_model(url, timeout),
        engine_id=engine or only_decoder(settings),
        timeout=timeout,
    )
    asked = [prompt_of(number, tokens * (number + 1) // prompts or 1) for number in range(prompts)]
    runs = tuple(verified(settings, place, asked, chosen if yes else (), answer, _tell))
    body = filled(
        Verification,
        place,
        prompts=prompts,
        max_tokens=answer,
        references_differ=sum(run.run == "reuse" and not run.equals for run in runs),
        wrong=sum(map(is_wrong, runs)),
        runs=runs,
    )
    show(body, settings)
    if not yes:
        say("no miss was forced; add --yes to force some")
    if body.wrong:
        raise CheckFailed(
            f"{body.wrong} of {len(runs)} runs are not as they should be", "-o wide shows each run's cause"
        )


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        say(what)
