"""The reading side of prefixes: asks kvd who holds more of a prompt than is cached here, and waits for that."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import Literal
from uuid import uuid4

from kvd.client.errors import ClientError
from kvd.shown import logger
from kvd.vllm.params import MOST_BLOCKS
from kvd.vllm.prompt.parts import is_plain_text
from kvd.vllm.vllm_types import VllmRequest, block_hashes
from kvd.wire.frame import Message
from kvd.wire.prefix import HASH_BYTES, FindPrefix, PrefixFound
from kvd.worker.remote import RemotePrefill
from kvd.worker.session import SessionProtocol
from kvd.worker.settings import ConnectorSettings

log = logger(__name__)

IDLE_SECONDS = 0.01
"""How long an idle engine waits for an answer without a step. Steps without tokens take a millisecond or more each, and
keep the answer waiting for Python's lock."""
MOST_HASHES = (2 << 20) // HASH_BYTES
"""Blocks of a prompt whose hashes are sent: as many as one field of a message holds."""


@dataclass(slots=True)
class _Asked:
    """A question for at most ``most`` tokens of one request's prompt.

    Its answer is waited for until ``due`` (time.monotonic()).
    """

    reader: str
    most: int
    answer: Future[Message]
    due: float


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """What another engine holds of a prompt, and the name under which it is read."""

    prefill: RemotePrefill
    reader: str


class PrefixSeeker:
    """One scheduler's questions. Touched by the scheduler's step only."""

    def __init__(
        self,
        settings: ConnectorSettings,
        engine_id: str,
        session: SessionProtocol,
        scheme: str,
        hash_tokens: int,
        groups: int,
    ) -> None:
        """``groups`` counts the engine's KV cache groups."""
        self._settings = settings
        self._engine_id = engine_id
        self._session = session
        self._scheme = scheme
        self._hash_tokens = hash_tokens
        self._groups = groups
        self._asked: dict[str, _Asked | None] = {}

    def look(
        self, request: VllmRequest, computed: int, *, idle: bool = False
    ) -> FoundPrefix | Literal["asking"] | None:
        """What was found for a request of which ``computed`` tokens are cached here. It is asked for once.

        Where the engine is ``idle``, and no other answer is awaited, this waits for it: `IDLE_SECONDS` at most.
        """
        name = request.request_id
        if name not in self._asked:
            alone = idle and not any(self._asked.values())
            self._asked[name] = asked = self._ask(request, computed)
            if alone and asked is not None:
                wait((asked.answer,), min(IDLE_SECONDS, self._settings.prefix_wait))
        asked = self._asked[name]
        if asked is None:
            return None
        if not asked.answer.done() and time.monotonic() < asked.due:
            return "asking"
        self._asked[name] = None
        return self._found(asked, computed)

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._asked.pop(request_id, None)

    def _ask(self, request: VllmRequest, computed: int) -> _Asked | None:
        most = request.num_prompt_tokens - 1  # the last one is computed here, for the first output
        if most - computed < self._settings.prefix_least or not is_plain_text(request):
            return None
        hashes = block_hashes(request)[: min(most // self._hash_tokens, MOST_HASHES)]
        state = self._session.state
        if not state.connected or any(len(one) != HASH_BYTES for one in hashes):
            return None
        reader, seconds = uuid4().hex, self._settings.prefix_wait
        question = FindPrefix(
            local_engine=self._engine_id,
            reader=reader,
            scheme=self._scheme,
            hash_tokens=self._hash_tokens,
            hashes=b"".join(hashes),
            most=most,
            beyond=computed + self._settings.prefix_least - 1,
        )
        return _Asked(reader, most, self._session.call(question, seconds), time.monotonic() + seconds)

    def _found(self, asked: _Asked, computed: int) -> FoundPrefix | None:
        if not asked.answer.done():
            return None
        try:
            found = asked.answer.result()
        except ClientError as error:
            log.info("nobody was asked for a prefix: %s", error.message)
            return None
        if not isinstance(found, PrefixFound) or found.tokens <= computed:
            return None
        if wrong := self._wrong(found, asked.most):
            log.warning(
                "engine %s at %s: its answer on a prefix is not used: %s",
                found.engine_id,
                found.endpoint,
                wrong,
            )
            return None
        prefill = RemotePrefill(
            engine_id=found.engine_id,
            request_id=f"prefix-{asked.reader}",
            generation=found.generation,
            host=found.endpoint.host,
            port=found.endpoint.port,
            tokens=found.tokens,
            blocks=found.blocks,
            first_blocks=found.first_blocks,
            lease_seconds=0.0,
            lease_opened=0.0,
        )
        return FoundPrefix(prefill, asked.reader)

    def _wrong(self, found: PrefixFound, most: int) -> str:
        """What cannot be so in an answer; nothing where all can. It may be of another host, and vLLM trusts ours."""
        if found.engine_id == self._engine_id or not found.generation:
            return "it names this very engine, or no generation"
        # Of more tokens than a prompt has vLLM would end with an assertion.
        if found.tokens > most or found.tokens % self._hash_tokens:
            return f"{found.tokens} tokens, wanted are at most {most} in blocks of {self._hash_tokens}"
        if not len(found.blocks) == len(found.first_blocks) == self._groups:
            return (
                f"blocks of {len(found.blocks)} groups and first blocks of {len(found.first_blocks)},"
                f" this engine has {self._groups}"
            )
        if bad := [one for one in (*found.first_blocks, *chain(*found.blocks)) if one >= MOST_BLOCKS]:
            return f"{bad[0]} is no block"
        return ""
