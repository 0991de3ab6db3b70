"""What a decoding worker says to the workers of a prefilling engine about a push; kept until it is heard."""

from __future__ import annotations

import time
from concurrent.futures import Future

from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.push import PushAnnounce, PushDone, PushKey, PushWithdraw
from kvd.worker.context import WorkerContext
from kvd.worker.orders import block_lists
from kvd.worker.push.arrival import Arrival
from kvd.worker.push.sent_blocks import sent_blocks
from kvd.worker.remote import RemotePrefill
from kvd.worker.session import SessionProtocol

WORDS_KEPT = 60.0
"""Seconds for which a withdrawal or a done is repeated to a kvd that does not take it."""


def push_key(context: WorkerContext, transfer_id: str, prefill: RemotePrefill) -> PushKey:
    """The name of this worker's part of a transfer."""
    return PushKey(
        transfer_id=transfer_id,
        prefiller=prefill.engine_id,
        prefiller_endpoint=Endpoint(prefill.host, prefill.port),
        decoder=context.engine_id,
        rank=context.rank,
    )


def announce(
    session: SessionProtocol, arrival: Arrival, generation: str, window: bytes, seconds: float
) -> Future[Message]:
    """Announce an arrival, for at most ``seconds`` in which it is not acknowledged.

    ``generation`` is the decoder's own, ``window`` what the window exported.
    """
    order, key = arrival.load.order, arrival.key

    def message() -> PushAnnounce:
        return PushAnnounce(
            key=key,
            generations=(order.prefill.generation, generation),
            tokens=order.tokens,
            computed=order.computed,
            blocks=tuple(sent_blocks(block_lists(order.groups)).values()),
            window=window,
            digest=order.digest,
            seconds=max(0.001, arrival.load.deadline - time.monotonic()),
        )

    return session.deliver(_topic(key), message, seconds)


def withdraw(session: SessionProtocol, key: PushKey, generation: str) -> None:
    """Have the workers of that generation of the prefiller write no more of it."""
    session.deliver(_topic(key), PushWithdraw(key=key, generation=generation), WORDS_KEPT)


def done(session: SessionProtocol, key: PushKey) -> None:
    """Everything is read; the prefiller may free its blocks."""
    session.deliver(_topic(key), PushDone(key=key), WORDS_KEPT)


def _topic(key: PushKey) -> str:
    """What words about a push are kept under: each takes the place of the one before, so that none comes after it."""
    return f"push {key.prefiller} {key.transfer_id}"
