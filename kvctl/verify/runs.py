"""What `kvctl verify` does with live engines: asks them in several ways and holds the answers against each other."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvctl import daemon
from kvctl.cli.settings import Settings
from kvctl.errors import CheckFailed
from kvctl.verify.endpoint import Completion, complete
from kvctl.views.verification import Reference, Run, VerifiedRun, first_difference
from kvd.wire import order
from kvd.wire.transfer import ListTransfers, TransferList

PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
LoadSeen = Literal["done", "missed", "recovered", "not seen"]
SEEN_SECONDS = 10.0
"""How long the ledger, or the order's end, is waited for after the answer is here."""
TRIES = 3
"""How often a miss is tried: on a busy engine the order may take another request's load."""
FIRST_TOKEN, LAST_TOKEN = 10, 500
"""Token ids of prompts: every model has these."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where to ask: the decoder, and either its prefiller or a router in front of both."""

    endpoint: str
    prefill: str
    router: str
    model: str
    engine_id: str
    timeout: float


def prompt_of(number: int, tokens: int) -> list[int]:
    """The same prompt for the same number."""
    dice = random.Random(number)  # noqa: S311 - no secret
    return [dice.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def verified(
    settings: Settings,
    place: Endpoints,
    prompts: Sequence[Sequence[int]],
    moments: Sequence[order.When],
    max_tokens: int,
    told: Callable[[str], None],
) -> Iterator[VerifiedRun]:
    """All runs of all prompts; ``told`` hears of each before it begins. Raises `KvctlError`."""
    for number, prompt in enumerate(prompts):
        told(f"prompt {number + 1} of {len(prompts)}: the references")
        alone = _answer(place, place.endpoint, prompt, max_tokens, uuid.uuid4().hex)
        name, reused = _handed_over(place, prompt, max_tokens)
        references: dict[Reference, tuple[int, ...]] = {"reuse": reused.tokens, "recompute": alone.tokens}
        load, cause = _loaded(settings, name)
        yield _run(number, prompt, "reuse", name, reused, {"recompute": alone.tokens}, load=load, cause=cause)
        for moment in moments:
            told(f"prompt {number + 1} of {len(prompts)}: a miss, {moment}")
            yield _missed(settings, place, number, prompt, moment, max_tokens, references)


def is_wrong(run: VerifiedRun) -> bool:
    """Whether a run shows a fault. The two references may differ by themselves."""
    if run.run == "reuse":
        return run.load != "done"
    return not run.equals or run.load != "recovered"


def _handed_over(place: Endpoints, prompt: Sequence[int], max_tokens: int) -> tuple[str, Completion]:
    """The answer with the prefiller's KV, and the id that the request got on the decoder."""
    name = uuid.uuid4().hex
    if place.router:
        return name, _answer(place, place.router, prompt, max_tokens, name)
    prefilled = _answer(place, place.prefill, prompt, 1, name, PREFILL_PARAMS)
    if not prefilled.params:
        raise CheckFailed(
            f"{place.prefill} handed nothing on: it answered without kv_transfer_params",
            "is it a prefilling engine with KvdConnector? its log says why a request is not offered",
        )
    return name, _answer(place, place.endpoint, prompt, max_tokens, name, prefilled.params)


def _answer(
    place: Endpoints,
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    name: str,
    params: Mapping[str, object] | None = None,
) -> Completion:
    return complete(
        url, place.model, prompt, max_tokens=max_tokens, name=name, params=params, timeout=place.timeout
    )


def _missed(
    settings: Settings,
    place: Endpoints,
    number: int,
    prompt: Sequence[int],
    moment: order.When,
    max_tokens: int,
    references: Mapping[Reference, tuple[int, ...]],
) -> VerifiedRun:
    """An answer whose load was made to miss."""
    for _ in range(TRIES):
        asked = order.ForceMiss(
            engine_id=place.engine_id,
            target=order.NextLoads(count=1, seconds=place.timeout),
            when=moment,
            carry_out=True,
        )
        plan = daemon.ask(settings, asked, order.ForcePlan)
        try:
            name, answer = _handed_over(place, prompt, max_tokens)
            miss = _own_miss(settings, plan.order_id, name)
        finally:
            clear = order.ClearForced(engine_id=place.engine_id, order_id=plan.order_id)
            daemon.ask(settings, clear, order.ForcedCleared)
        if miss is not None:
            break
    run: Run = "flight" if moment == "now" else moment
    load: LoadSeen = "not seen"
    cause, recovery = f"the order took other requests' loads {TRIES} times, or none came", None
    if miss is not None:
        load, cause = "missed", miss.cause
        if miss.state == "recovered":
            load, recovery = "recovered", miss.steps["first_token"] - miss.steps["forced"]
    return _run(number, prompt, run, name, answer, references, load=load, cause=cause, recovery=recovery)


def _own_miss(settings: Settings, order_id: str, name: str) -> order.Miss | None:
    """What the order did to this very request, once that is over; None where it did nothing to it."""
    until = time.monotonic() + SEEN_SECONDS
    revision = -1
    while (left := until - time.monotonic()) > 0:
        question = order.GetForced(order_id=order_id, revision=revision, seconds=min(left, 1.0))
        forced = daemon.ask(settings, question, order.ForcedMisses)
        revision = forced.revision
        own = next((miss for miss in forced.misses if name in miss.request_id), None)
        if own is None and forced.misses:
            return None
        if own is not None and own.state in order.MISS_ENDS:
            return own
    return own


def _loaded(settings: Settings, name: str) -> tuple[LoadSeen, str]:
    """What the ledger has of a request's load, and why it missed."""
    until = time.monotonic() + SEEN_SECONDS
    while time.monotonic() < until:
        rows = daemon.ask(settings, ListTransfers(limit=200, within=600.0), TransferList).rows
        own = [row.record for row in rows if name in row.record.request_id]
        if own:
            misses = [record.cause for record in own if record.state == "miss"]
            return ("missed", misses[0]) if misses else ("done", "")
        time.sleep(0.1)
    return "not seen", "kvd's ledger has no transfer of this request: was its KV loaded at all?"


def _run(  # noqa: PLR0913 - the fields of a row
    number: int,
    prompt: Sequence[int],
    run: Run,
    name: str,
    answer: Completion,
    references: Mapping[Reference, tuple[int, ...]],
    *,
    load: LoadSeen,
    cause: str,
    recovery: float | None = None,
) -> VerifiedRun:
    differences = {of: first_difference(answer.tokens, tokens) for of, tokens in references.items()}
    equals = tuple(of for of, difference in differences.items() if difference is None)
    latest = max((d for d in differences.values() if d is not None), key=lambda d: d[0], default=None)
    at, expected, got = latest if latest is not None and not equals else (None, None, None)
    return VerifiedRun(
        prompt=number,
        prompt_tokens=len(prompt),
        run=run,
        request_id=name,
        equals=equals,
        differs_at=at,
        expected=expected,
        got=got,
        load=load,
        recovery=recovery,
        cause=cause,
    )
