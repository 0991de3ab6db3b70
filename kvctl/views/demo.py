"""The Demo document: what `kvctl demo` prints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvctl.views.fields import Bytes, Count, RankName, Seconds
from kvctl.views.topology.document import Topology

Mode = Literal["pull", "push"]


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
