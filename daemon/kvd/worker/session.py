"""What the two halves use of a session with kvd, so that tests can put another one in its place."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvd.client.session import SessionState
from kvd.wire.frame import Message


class SessionProtocol(Protocol):
    """A session: `kvd.client.session.KvdSession` is the real one."""

    @property
    def state(self) -> SessionState:
        """The newest state, read without a lock."""

    def call(self, message: Message, timeout: float) -> Future[Message]:
        """Ask; the future gets the answer."""

    def deliver(
        self,
        key: str,
        message: Message | Callable[[], Message],
        keep_seconds: float = ...,
        *,
        after: float = ...,
    ) -> Future[Message]:
        """Send until it is answered, not before ``after`` seconds."""

    def close(self, timeout: float = ...) -> None:
        """Say goodbye."""
