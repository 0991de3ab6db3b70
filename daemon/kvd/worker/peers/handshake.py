"""Asking kvd for a peer engine, part by part where its card is large and kvd tells no outline of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from kvd.client.errors import ClientError
from kvd.shown import logger
from kvd.wire.card_parts import Gathering, ToldCard
from kvd.wire.errors import BadCard
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.worker.cause import Cause, from_error, refusal_code
from kvd.worker.session import SessionProtocol

log = logger(__name__)

Answered = Callable[[ToldCard | Cause], None]


def ask_for_peer(
    session: SessionProtocol, asked: GetPeer, seconds: float, answered: Answered, *, role: str = "peer"
) -> None:
    """Ask for a peer, called by its ``role`` in messages; for ``seconds`` until all parts of its card are here.

    ``answered`` gets the card or why there is none, on the session's thread.

    If it raises over a card it is called again with a cause: a future swallows what its callback raises, and whoever
    asked would wait for ever.
    """
    _Asking(lambda: session, asked, time.monotonic() + seconds, answered, f"{role} {asked.engine_id}").ask(
        seconds
    )


def complete(
    session: Callable[[], SessionProtocol], told: PeerReady, seconds: float, answered: Answered
) -> None:
    """Ask for what is missing of a card that kvd told unasked, and give the whole as `ask_for_peer` does.

    ``session`` is looked at only where something is missing. Raises `BadCard` for a part that cannot be the first.
    """
    asked = GetPeer(
        local_engine=told.local_engine,
        engine_id=told.peer.engine.engine_id,
        endpoint=told.endpoint,
        generation=told.peer.generation,
    )
    who = f"peer {asked.engine_id}"
    _Asking(session, asked, time.monotonic() + seconds, answered, who).take(told)


class _Asking:
    """One card on its way here; used by the session's thread once the first question is out."""

    def __init__(
        self,
        session: Callable[[], SessionProtocol],
        asked: GetPeer,
        deadline: float,
        answered: Answered,
        who: str,
    ) -> None:
        self._session = session
        self._asked = asked
        self._deadline = deadline
        self._answered = answered
        self._who = who
        self._parts = Gathering()

    def ask(self, seconds: float) -> None:
        """Ask for the next part, or for the first."""
        question = msgspec.structs.replace(self._asked, first=self._parts.count)
        self._session().call(question, seconds).add_done_callback(self._look)

    def take(self, ready: PeerReady) -> None:
        """Take an answer, and ask on where it is not the last. Raises `BadCard` and what ``answered`` raises."""
        if ready.part is None:
            self._answered(ToldCard(ready.peer, outline=ready.outline))
        elif self._parts.add(ready.peer.engine, ready.part):
            self._answered(ToldCard(ready.peer, self._parts))
        else:
            # The rest of this generation, and of no other.
            self._asked = msgspec.structs.replace(self._asked, generation=ready.peer.generation)
            self.ask(max(0.1, self._deadline - time.monotonic()))

    def _look(self, done: Future[Message]) -> None:
        try:
            answer = done.result()
            if isinstance(answer, PeerReady):
                self.take(answer)
                return
            cause = Cause(f"{self._who}: kvd answered {type(answer).__name__}", "PEER_REFUSED")
        except (ClientError, BadCard) as error:
            cause = Cause(f"{self._who}: {error.message}", refusal_code(error))
        except Exception as error:
            log.exception("answer about %s", self._who)
            cause = from_error(error, self._who)
        self._answered(cause)
