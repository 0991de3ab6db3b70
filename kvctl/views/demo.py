"""The Demo document: what `kvctl demo` prints."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvctl.cli.numbers import rate, size, span
from kvctl.cli.units import Bytes, Count, Mode, Seconds
from kvctl.views.registry import View
from kvctl.views.screen import Column, ScreenPart, Styled, number, table, yes_or_no
from kvctl.views.topology.document import Topology
from kvctl.views.topology.screen import topology_screen
from kvd.geometry.rank import RankName


class DemoRequest(Struct, frozen=True, kw_only=True):
    """One request: prefilled by one engine, decoded by the other."""

    request: str
    prompt_tokens: Annotated[int, Meta(ge=0, description="length of the prompt")]
    external_tokens: Annotated[int, Meta(ge=0, description="of them, those whose KV came from the prefiller")]
    output_tokens: Annotated[int, Meta(ge=0, description="tokens the decoder answered; 0 when simulated")]
    bytes: Annotated[Bytes, Meta(description="bytes of KV moved, from the ledger of the decoder's kvd")]
    copies: Annotated[int, Meta(ge=0, description="separate copies that they were moved in")]
    remote_ranks: Annotated[tuple[RankName, ...], Meta(description="workers they came from")]
    handshake_seconds: Annotated[
        Seconds, Meta(description="until the prefilling engine was known, in seconds; 0 when it was")
    ]
    transfer_seconds: Annotated[Seconds, Meta(description="moving the bytes, in seconds")]
    equal: Annotated[
        bool, Meta(description="the output is the single engine's; simulated: every byte is as expected")
    ]
    problem: Annotated[str, Meta(description="why the request does not count as served; may be empty")]


class Demo(Struct, frozen=True, kw_only=True):
    """Requests through a prefilling and a decoding engine, and whether all of them came out right."""

    ok: bool
    mode: Annotated[
        Mode,
        Meta(description="the decoder read after the prefill, or the prefiller sent layer by layer"),
    ]
    simulated: Annotated[bool, Meta(description="worker processes with made-up KV instead of vLLM")]
    model: str
    seconds: Annotated[Seconds, Meta(description="the whole demo up to this document, in seconds")]
    bytes: Annotated[Bytes, Meta(description="bytes of KV moved by all requests")]
    leases_released: Annotated[
        Count, Meta(description="by the decoder, as the prefiller's kvd counts; none in mode push")
    ]
    requests: tuple[DemoRequest, ...]
    topology: Topology


def demo_screen(body: Demo, wide: bool) -> ScreenPart:
    """What moved from where to where, request by request."""
    pulled = body.mode == "pull"
    requests = table(
        body.requests,
        Column("REQUEST", lambda r: r.request),
        number("PROMPT", lambda r: r.prompt_tokens),
        number("REMOTE", lambda r: r.external_tokens),
        number("NEW", lambda r: r.output_tokens, not body.simulated),
        number("BYTES", lambda r: size(r.bytes)),
        number("HANDSHAKE", lambda r: span(r.handshake_seconds) if r.handshake_seconds else "known"),
        number("TRANSFER", lambda r: span(r.transfer_seconds)),
        # What is pushed comes as it is computed: how long that took says nothing of how fast the bytes went.
        number(
            "RATE", lambda r: rate(r.bytes / r.transfer_seconds if r.transfer_seconds and pulled else None)
        ),
        number("COPIES", lambda r: r.copies if pulled else None, wide),
        Column("SOURCES", lambda r: ", ".join(r.remote_ranks) or "-", wide),
        Column("INTACT" if body.simulated else "EQUAL", lambda r: yes_or_no(good=r.equal)),
    )
    parts: list[ScreenPart] = [topology_screen(body.topology, wide), ""] if body.topology.pairs else []
    parts += [requests, "", _result(body)]
    parts += [
        Styled(f"{request.request}: {request.problem}", "red") for request in body.requests if request.problem
    ]
    return parts


def _result(body: Demo) -> ScreenPart:
    count, good = len(body.requests), sum(request.equal and not request.problem for request in body.requests)
    came = sum(request.external_tokens for request in body.requests)
    asked = sum(request.prompt_tokens for request in body.requests)
    right = "every byte is as it must be" if body.simulated else "every output is the single engine's"
    came_out = f"{good} of {count} requests came out right"
    way = f"{body.leases_released} leases released" if body.mode == "pull" else "pushed layer by layer"
    return (
        Styled(came_out, "green" if body.ok else "bold red"),
        f": {right}. " if body.ok else ". ",
        f"{size(body.bytes)} moved for {came} of {asked} prompt tokens, {way}, {span(body.seconds)} in all.",
    )


VIEWS = (View(Demo, demo_screen, "requests", DemoRequest),)
