"""Asking kvd for a peer engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from kvd.client.errors import ClientError
from kvd.shown import logger
from kvd.wire.frame import Message
from kvd.wire.handshake import GetPeer, PeerReady
from kvd.wire.identity import EngineCard
from kvd.worker.cause import Cause, from_error, refusal_code
from kvd.worker.session import SessionProtocol

log = logger(__name__)


def ask_for_peer(
    session: SessionProtocol,
    asked: GetPeer,
    seconds: float,
    answered: Callable[[EngineCard | Cause], None],
    *,
    role: str = "peer",
) -> None:
    """Ask for a peer, called by its ``role`` in messages.

    ``answered`` gets the card or why there is none, on the session's thread.

    If it raises over a card it is called again with a cause: a future swallows what its callback raises, and whoever
    asked would wait for ever.
    """
    who = f"{role} {asked.engine_id}"

    def look(done: Future[Message]) -> None:
        try:
            answer = done.result()
            if isinstance(answer, PeerReady):
                answered(answer.peer)
                return
            cause = Cause(f"{who}: kvd answered {type(answer).__name__}", "PEER_REFUSED")
        except ClientError as error:
            cause = Cause(f"{who}: {error.message}", refusal_code(error))
        except Exception as error:
            log.exception("answer about %s", who)
            cause = from_error(error, who)
        answered(cause)

    session.call(asked, seconds).add_done_callback(look)
