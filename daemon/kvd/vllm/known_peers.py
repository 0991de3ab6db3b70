"""Which peer engines kvd has found to fit, for the requests that arrive while it is away."""

from __future__ import annotations

from kvd.vllm.params import RemotePrefill
from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady


class KnownPeers:
    """Generations of the peer engines that kvd found to fit.

    Touched by the scheduler's step and the session's thread, each time for one operation on a dictionary.
    """

    def __init__(self) -> None:
        self._generations: dict[str, str] = {}

    def learn(self, engine_id: str, generation: str) -> None:
        """This generation was found to fit."""
        self._generations[engine_id] = generation

    def pushed(self, message: Message) -> None:
        """On the session's thread: a peer became known, or its generation ended."""
        if isinstance(message, PeerReady):
            self.learn(message.peer.engine.engine_id, message.peer.generation)
        elif isinstance(message, PeerGone) and self._generations.get(message.engine_id) == message.generation:
            self._generations.pop(message.engine_id, None)

    def fits(self, prefill: RemotePrefill) -> bool:
        """Whether a prefill comes from a generation that is known to fit."""
        return self._generations.get(prefill.engine_id) == prefill.generation
