"""`kvctl force-miss`."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, cast, get_args

import typer

from kvctl import daemon
from kvctl.cli.option_kinds import choice, duration, number
from kvctl.cli.parsing import share
from kvctl.cli.settings import Settings
from kvctl.cli.talk import say
from kvctl.engines.decoder import DecoderOption, only_decoder
from kvctl.errors import CheckFailed, DaemonUnreachable, PeerTimeout, UsageError
from kvctl.views.forced_miss import ClearedOrders, ForcedMiss, forced_document, planned_document
from kvctl.views.output import show
from kvd.geometry.rank import Rank
from kvd.wire import order

SECTION = "Try faults"
EXAMPLES = (
    "kvctl force-miss cmpl-2  # says what it would do",
    "kvctl force-miss cmpl-2 --yes --wait",
    "kvctl force-miss --ratio 0.01 --for 5m --yes",
)
WHEN = get_args(order.When)
WAIT_SECONDS = 60.0
"""How long --wait follows where --timeout does not say."""
ASK_AGAIN = 1.0
"""Seconds that kvd may keep a question until there is news."""
AWAY_PAUSE = 0.2


def whole(text: str) -> int:
    """An option's parser for a whole number."""
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def rank_named(text: str) -> Rank:
    """An option's parser for a worker's place: ``tp1``, ``tp1.pp2``, ``tp0.dcp1``."""
    found = re.fullmatch(r"tp(\d+)(?:\.pp(\d+))?(?:\.dcp(\d+))?", text)
    if found is None:
        raise ValueError(f"{text!r} is no rank; write tp1, tp1.pp2 or tp0.dcp1")
    return Rank(*(int(number or 0) for number in found.groups()))


def force_miss(  # noqa: PLR0913 - each is an option
    settings: Settings,
    *,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Id of the request, of its transfer or of its prefill.")
    ] = "",
    engine: DecoderOption = "",
    waiting: Annotated[bool, typer.Option("--waiting", help="All requests that wait for their KV.")] = False,
    number: Annotated[int | None, number("--next", help="The next N loads.")] = None,
    part: Annotated[
        float | None,
        typer.Option(
            "--ratio", metavar="P", parser=share, help="Of further loads this part, taken at random."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", parser=whole, help="Takes the same ones again. [0]")
    ] = None,
    span: Annotated[
        float | None,
        duration("--for", metavar="SECONDS", help="An order for further loads ends after this. [10m]"),
    ] = None,
    when: Annotated[
        str | None,
        choice(
            "--when",
            WHEN,
            help="Before anything is read, in flight, after a part has arrived. [now: as soon as can be]",
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option("--group", metavar="N", parser=whole, help="Only this KV cache group fails.")
    ] = None,
    layer: Annotated[str, typer.Option("--layer", metavar="NAME", help="Only this layer fails.")] = "",
    rank: Annotated[
        Rank | None,
        typer.Option("--rank", metavar="RANK", parser=rank_named, help="Only this worker's part fails: tp1."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be done.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help=f"Follow each request to its first token, for --timeout, else {WAIT_SECONDS:g}s."
        ),
    ] = False,
    order_id: Annotated[str, typer.Option("--order", metavar="ID", help="Show an order given before.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="End the orders for further loads.")] = False,
) -> None:
    """Have KV loads of a running engine miss, to see it recover.

    Says what would be recomputed, and does it with --yes. Refused with exit code 5 where the engine cannot recover
    (policy fail), 6 for users who may not, 1 for a request that is unknown, finished or loaded already. With --wait:
    0 when all recovered, 1 when one did not, 4 when time ran out.
    """
    further = number is not None or part is not None
    _one_of(request=bool(request), waiting=waiting, next=further, order=bool(order_id), clear=clear)
    if (seed is not None or span is not None) and not further:
        name = "--for" if seed is None else "--seed"
        raise UsageError(f"{name} is given without --next or --ratio", "give one of these, or leave it out")
    if (group is not None or layer) and when not in (None, "now", "layers"):
        raise UsageError(f"--group and --layer fail when all else has arrived, not --when {when}")
    if clear:
        _clear(settings, engine)
        return
    if order_id:
        _show_order(settings, order_id, wait=wait)
        return
    target: order.Target = order.OneRequest(request)
    if waiting:
        target = order.AllWaiting()
    elif further:
        target = order.NextLoads(count=number or 0, ratio=part or 1.0, seed=seed or 0, seconds=span or 600.0)
    message = order.ForceMiss(
        engine_id=engine or only_decoder(settings),
        target=target,
        when=cast("order.When", when or "now"),
        part=order.LoadPart(group=group, layer=layer, rank=rank),
        carry_out=yes,
    )
    plan = daemon.ask(settings, message, order.ForcePlan)
    if not plan.carried_out:
        show(planned_document(plan), settings)
        say("nothing was done; add --yes to do it")
    else:
        _show_order(settings, plan.order_id, wait=wait)


def _one_of(**given: bool) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if len(names) != 1:
        said = " and ".join(f"--{name}".replace("--request", "a request") for name in names) or "none"
        raise UsageError(
            f"give one of: a request, --waiting, --next or --ratio, --order, --clear; given: {said}",
            "see kvctl force-miss --help",
        )


def _clear(settings: Settings, engine: str) -> None:
    message = order.ClearForced(engine_id=engine or only_decoder(settings))
    cleared = daemon.ask(settings, message, order.ForcedCleared)
    if not cleared.order_ids:
        say(f"{message.engine_id} has no order for further loads")
    show(ClearedOrders(engine_id=message.engine_id, order_ids=cleared.order_ids), settings)


def _show_order(settings: Settings, order_id: str, *, wait: bool) -> None:
    forced = daemon.ask(settings, order.GetForced(order_id=order_id), order.ForcedMisses)
    if not wait:
        show(forced_document(forced), settings)
        if not _over(forced):
            say(f"follow it with `kvctl force-miss --order {order_id} --wait`")
        return
    patience = settings.timeout if settings.timeout_given else WAIT_SECONDS
    forced = _followed(settings, forced, time.monotonic() + patience)
    body = forced_document(forced)
    show(body, settings)
    _judge(forced, body, patience)


def _followed(settings: Settings, forced: order.ForcedMisses, deadline: float) -> order.ForcedMisses:
    """The order when it is over, or as it was last seen before the deadline. kvd may go away and come back."""
    order_id = forced.order.plan.order_id
    told = False
    with _progress(settings) as tell:
        while not _over(forced) and (left := deadline - time.monotonic()) > 0:
            tell(forced)
            question = order.GetForced(
                order_id=order_id, revision=forced.revision, seconds=min(left, ASK_AGAIN)
            )
            try:
                forced = daemon.ask(settings, question, order.ForcedMisses)
            except (DaemonUnreachable, CheckFailed) as error:
                # A kvd that was started again knows the order when the engine has reported again.
                if time.monotonic() + AWAY_PAUSE > deadline:
                    raise
                if not told:
                    say(f"{error.message}; still waiting")
                told = True
                time.sleep(AWAY_PAUSE)
    return forced


@contextlib.contextmanager
def _progress(settings: Settings) -> Iterator[Callable[[order.ForcedMisses], None]]:
    """A line on stderr where that is a terminal; gives the function that renews it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    console = Console(stderr=True, no_color=settings.color == "never")
    with console.status("waiting") as status:

        def tell(forced: order.ForcedMisses) -> None:
            body = forced_document(forced)
            status.update(f"{body.recovered} of {body.taken} have recovered")

        yield tell


def _over(forced: order.ForcedMisses) -> bool:
    ended = sum(miss.state in order.MISS_ENDS for miss in forced.misses)
    complete = ended == len(forced.misses) >= forced.order.taken
    return bool(forced.gone) or (complete and not forced.order.open)


def _judge(forced: order.ForcedMisses, body: ForcedMiss, patience: float) -> None:
    failed = [f"{r.request_id} ({r.state})" for r in body.requests if r.state != "recovered"]
    if forced.gone:
        raise CheckFailed(f"engine {body.engine_id} carries order {body.order_id} out no more: {forced.gone}")
    if not _over(forced):
        open_ = "; further loads will be taken until `kvctl force-miss --clear`" if body.open else ""
        raise PeerTimeout(
            f"not over after {patience:g} s: {body.recovered} of {body.taken} have recovered{open_}",
            f"follow it with `kvctl force-miss --order {body.order_id} --wait`",
        )
    if failed:
        raise CheckFailed(
            f"{len(failed)} of {body.taken} did not miss and recover: {', '.join(failed[:5])}",
            "the column CAUSE says why",
        )
