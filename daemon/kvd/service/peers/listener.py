"""Who is told of what links to other kvds see."""

from __future__ import annotations

from typing import Protocol

from kvd.wire.identity import Endpoint


class Listener(Protocol):
    """Who has to be told of what links see; called on the loop, must not wait."""

    def known_ids(self, endpoint: Endpoint) -> tuple[str, ...]:
        """The ids of all engines behind an endpoint that are known, gone ones too."""

    def using(self, endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
        """The engines (id, generation) behind an endpoint that local ones use."""

    def link_up(self, endpoint: Endpoint) -> None:
        """The peer answers (again)."""

    def link_down(self, endpoint: Endpoint, reason: str) -> None:
        """The peer does not answer."""

    def peer_engine_gone(self, endpoint: Endpoint, engine_id: str, generation: str, reason: str) -> None:
        """The peer says that this generation ended."""

    def peer_engines_ready(self, endpoint: Endpoint, ready: tuple[tuple[str, str], ...]) -> None:
        """The peer has these engines (id, generation)."""

    def engines_changed(self, endpoint: Endpoint) -> None:
        """The peer has other engines than before."""

    def peer_engines_draining(self, endpoint: Endpoint, draining: tuple[str, ...]) -> None:
        """Of the engines that are known these are draining, and no other is."""
