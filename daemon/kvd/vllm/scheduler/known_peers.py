"""Which peer engines are known to fit, and under which key each makes digests of its prompts."""

from __future__ import annotations

from kvd.vllm.prompt.digest import KEY_BYTES
from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady
from kvd.wire.identity import EngineCard
from kvd.worker.remote import RemotePrefill


class KnownPeers:
    """Generations of the peer engines that kvd found to fit.

    Touched by the scheduler's step and the session's thread, each time for one operation on a dictionary.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, bytes]] = {}

    def learn(self, card: EngineCard) -> None:
        """This generation was found to fit.

        The first key of a generation stays: params name the kvd that is asked, and whoever answers there may say that
        it is that engine, with a key of its own.
        """
        engine_id = card.engine.engine_id
        generation, key = self._found.get(engine_id, ("", b""))
        known = key if generation == card.generation else b""
        given = card.digest_key if len(card.digest_key) == KEY_BYTES else b""
        self._found[engine_id] = card.generation, known or given

    def pushed(self, message: Message) -> None:
        """On the session's thread: a peer became known, or its generation ended."""
        if isinstance(message, PeerReady):
            self.learn(message.peer)
        elif isinstance(message, PeerGone) and self._generation(message.engine_id) == message.generation:
            self._found.pop(message.engine_id, None)

    def fits(self, prefill: RemotePrefill) -> bool:
        """Whether a prefill comes from a generation that is known to fit."""
        return self._generation(prefill.engine_id) == prefill.generation

    def digest_key(self, prefill: RemotePrefill) -> bytes:
        """The key of the generation that a prefill comes from, empty where it is not known."""
        generation, key = self._found.get(prefill.engine_id, ("", b""))
        return key if generation == prefill.generation else b""

    def _generation(self, engine_id: str) -> str | None:
        found = self._found.get(engine_id)
        return None if found is None else found[0]
