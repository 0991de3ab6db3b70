"""Which peer engines are known to fit, and under which key each makes digests of its prompts."""

from __future__ import annotations

from kvd.wire.frame import Message
from kvd.wire.handshake import PeerGone, PeerReady
from kvd.wire.identity import DIGEST_KEY_BYTES, HERE, Endpoint, EngineCard
from kvd.worker.remote import RemotePrefill


class KnownPeers:
    """Generations of the peer engines that kvd found to fit, each with the kvd that said so.

    Params name the kvd that is asked, and whoever answers there may say that it is some engine, with a key of its own.
    So what one kvd says is used for prefills that name this kvd alone.

    Touched by the scheduler's step and the session's thread, each time for one operation on a dictionary.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, Endpoint], tuple[str, bytes]] = {}

    def learn(self, card: EngineCard, endpoint: Endpoint) -> None:
        """The kvd at ``endpoint`` has this generation, and it fits. The first key of a generation stays."""
        of = card.engine.engine_id, endpoint
        generation, key = self._found.get(of, ("", b""))
        known = key if generation == card.generation else b""
        given = card.digest_key if len(card.digest_key) == DIGEST_KEY_BYTES else b""
        self._found[of] = card.generation, known or given

    def on_message(self, message: Message) -> None:
        """On the session's thread: a peer became known, or its generation ended."""
        if isinstance(message, PeerReady):
            self.learn(message.peer, message.endpoint)
        elif isinstance(message, PeerGone):
            for of, (generation, _) in list(self._found.items()):
                if (of[0], generation) == (message.engine_id, message.generation):
                    self._found.pop(of, None)

    def fits(self, prefill: RemotePrefill) -> bool:
        """Whether a prefill comes from a generation that is known to fit."""
        return self._key(prefill) is not None

    def digest_key(self, prefill: RemotePrefill) -> bytes:
        """The key of the generation that a prefill comes from, empty where it is not known."""
        return self._key(prefill) or b""

    def _key(self, prefill: RemotePrefill) -> bytes | None:
        """Of the kvd that the prefill names; None where it is not known to have that generation."""
        for endpoint in (HERE, Endpoint(prefill.host, prefill.port)):
            generation, key = self._found.get((prefill.engine_id, endpoint), (None, b""))
            if generation == prefill.generation:
                return key
        return None
