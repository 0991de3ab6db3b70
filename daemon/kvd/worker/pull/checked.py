"""Reads of a prefix cache: its holder keeps no block for them, so it is asked once all has come.

The answer is on what was the case until the question came there. Whatever was read before that may be used, if the
blocks held it until then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvd.client.errors import ClientError
from kvd.wire.frame import Message
from kvd.wire.identity import Endpoint
from kvd.wire.prefix import CheckPrefix, PrefixKept
from kvd.worker.cause import Cause, refusal_code
from kvd.worker.load import Load
from kvd.worker.session import SessionProtocol

CHECK_SECONDS = 2.0
"""How long the holder may take to answer: as long as a worker that is asked for anything else."""


class CheckedReads:
    """Holds back what was read of prefixes. `check` is called on any thread."""

    def __init__(self, session: Callable[[], SessionProtocol]) -> None:
        self._session = session
        self._waiting: dict[int, Load] = {}

    def check(self, load: Load, report: Callable[[], None]) -> None:
        """Report a load that has ended, once its holder was asked. Of one that is a miss nothing may be used.

        One that is made a miss while its holder is asked is reported at once, and no second time.
        """
        if load.cause is not None:
            self._waiting.pop(id(load), None)
            load.spoil(load.cause)
            report()
            return
        prefill = load.order.prefill
        question = CheckPrefix(
            engine_id=prefill.engine_id,
            generation=prefill.generation,
            reader=load.order.reader,
            endpoint=Endpoint(prefill.host, prefill.port),
            bytes=sum(copies.nbytes for copies in load.pieces.copies),
        )
        self._waiting[id(load)] = load
        self._session().call(question, CHECK_SECONDS).add_done_callback(partial(self._answered, load, report))

    def _answered(self, load: Load, report: Callable[[], None], answer: Future[Message]) -> None:
        if self._waiting.pop(id(load), None) is None:
            return
        if cause := _cause(load.order.prefill.engine_id, answer):
            load.spoil(cause)
        report()


def _cause(holder: str, answer: Future[Message]) -> Cause | None:
    """Why nothing of the load may be used; None where all may."""
    try:
        kept = answer.result()
    except ClientError as error:
        return Cause(f"whether {holder} still held the prefix: {error.message}", refusal_code(error))
    if isinstance(kept, PrefixKept) and kept.kept:
        return None
    why = kept.reason if isinstance(kept, PrefixKept) else f"kvd answered {type(kept).__name__}"
    return Cause(f"{holder} did not hold the prefix until it was read: {why}", "PREFIX_LOST")
